"""Cores belong to a process until it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nxd_infer.backends.neuron import cores
from nxd_infer.errors import BackendUnavailableError
from tests.support.neuron.machines import described


def test_another_process_keeps_its_cores_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cores.ROOT, str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(cores.VISIBLE, raising=False)
    monkeypatch.delenv(cores.COUNT, raising=False)
    described(tmp_path, "inf2.xlarge", 1)
    code = "from nxd_infer.backends.neuron import cores\nc = cores.claim(2)\nprint(c.cores, flush=True)\ninput()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and re.match(r"range\(0, 2\)", other.stdout.readline())
        with pytest.raises(BackendUnavailableError, match="in use by other processes, which keep them until they end"):
            cores.claim(1)
    finally:
        other.kill()
        other.communicate(timeout=60)
    cores.claim(2).close()
    monkeypatch.delenv(cores.VISIBLE, raising=False)
