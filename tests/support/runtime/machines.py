"""Machines of any number of cores, as far as ranks are placed on them."""

from __future__ import annotations

import tempfile

import pytest

from nxd_infer.runtime.supervisor import cores
from nxd_infer.util import machine as host


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes this one of ``count`` logical cores, two a physical one unless ``alone``, with a share of the processor."""

    def make(count: int, pair: str, share: float = float("inf")) -> None:
        first = {"far": lambda core: core % (count // 2), "near": lambda core: core // 2, "alone": lambda core: core}
        for module in (cores, host):
            monkeypatch.setattr(module, "available_cores", lambda: list(range(count)))
            monkeypatch.setattr(module, "physical_core", lambda core: str(first[pair](core)))
            monkeypatch.setattr(module, "processor_share", lambda: share)

    monkeypatch.delenv("NXD_INFER_PIN", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cores, "_used", type(cores._used)())
    monkeypatch.setattr(cores, "_leads", type(cores._leads)())
    monkeypatch.setattr(cores, "_claims", {})
    return make
