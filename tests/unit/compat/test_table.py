"""The table of old names: every entry resolves, and a module under an old name behaves as a module."""

from __future__ import annotations

import importlib
import sys
from unittest import mock

import pytest

from nxd_infer import compat
from nxd_infer.compat.names import OLD, Module
from nxd_infer.compat.views import DeviceName
from nxd_infer.errors import DeviceOnlyError
from nxd_infer.parallel_layers import pad

EXAMPLE = "neuronx_distributed.example.module"


@pytest.fixture(autouse=True)
def aliases(monkeypatch: pytest.MonkeyPatch):
    table = Module("nxd_infer.parallel_layers.pad", {"seed": "torch:manual_seed"}, {"kernel": "call other()"})
    monkeypatch.setitem(OLD, EXAMPLE, table)
    before = compat.is_installed()
    compat.install()
    yield
    for name in (EXAMPLE, EXAMPLE.rpartition(".")[0]):
        sys.modules.pop(name, None)
    if not before:
        compat.uninstall()


@pytest.mark.parametrize("path", OLD)
def test_every_entry_imports_and_resolves(path: str):
    module = importlib.import_module(path)
    for name in OLD[path].names:
        assert hasattr(module, name), name
    for name in OLD[path].device:
        assert isinstance(getattr(module, name), DeviceName)
    assert list(OLD[path].names) == sorted(OLD[path].names) and list(OLD[path].device) == sorted(OLD[path].device)
    assert path == EXAMPLE or list(OLD)[:-1] == sorted(list(OLD)[:-1])


def test_a_view_has_the_tables_names_and_all_of_ours():
    module = importlib.import_module(EXAMPLE)
    assert module.pad_model is pad.pad_model and module.seed.__name__ == "manual_seed"
    assert {"seed", "kernel", "pad_model"} <= set(dir(module)) and "module" in dir(
        sys.modules["neuronx_distributed.example"]
    )
    for absent in ("nothing", "_nothing", "__wrapped__"):
        assert not hasattr(module, absent)
    taken: dict = {}
    exec(f"from {EXAMPLE} import *\nimport {EXAMPLE} as m\nfrom neuronx_distributed import example", taken)
    assert taken["pad_model"] is pad.pad_model and taken["m"] is module is taken["example"].module
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {EXAMPLE} import nothing", {})


def test_what_a_script_patches_is_ours():
    module = importlib.import_module(EXAMPLE)
    original = pad.get_number_of_extra_heads
    with mock.patch(f"{EXAMPLE}.get_number_of_extra_heads", lambda *args: 7):
        assert pad.get_number_of_extra_heads(1, 2) == module.get_number_of_extra_heads(1, 2) == 7
    assert pad.get_number_of_extra_heads is module.get_number_of_extra_heads is original


def test_a_name_for_the_device_imports_and_says_what_to_call_instead():
    kernel = importlib.import_module(EXAMPLE).kernel
    decorated, derived = "@kernel\ndef function(): ...", "class Derived(kernel): ..."
    for use in ("kernel(1)", "kernel[2, 4](1)", "kernel.attribute", decorated, derived):
        with pytest.raises(DeviceOnlyError, match=r"example\.module\.kernel needs a Neuron device: call other\(\)"):
            exec(use, {"kernel": kernel})
    assert not isinstance(1, kernel) and (kernel | None) is not None
