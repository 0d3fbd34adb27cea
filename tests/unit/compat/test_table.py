"""The table of old names: every entry resolves, and a module under an old name behaves as a module."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from pathlib import Path
from unittest import mock

import pytest

import nxd_infer
from nxd_infer import compat
from nxd_infer.compat.names import OLD, Module
from nxd_infer.compat.views import DeviceName
from nxd_infer.errors import DeviceOnlyError
from nxd_infer.parallel_layers import pad
from tests.support.neuron.machines import forget

EXAMPLE = "neuronx_distributed.example.module"
ANSWERED = [path for path in OLD if importlib.machinery.PathFinder.find_spec(path.partition(".")[0]) is None]
"""Those of no package that is really installed, as torch_xla may be."""


@pytest.fixture(autouse=True)
def aliases(monkeypatch: pytest.MonkeyPatch):
    table = Module("nxd_infer.parallel_layers.pad", {"seed": "torch:manual_seed"}, {"kernel": "call other()"})
    monkeypatch.setitem(OLD, EXAMPLE, table)
    before = compat.is_installed()
    compat.install()
    forget(monkeypatch)
    yield
    for name in (EXAMPLE, EXAMPLE.rpartition(".")[0]):
        sys.modules.pop(name, None)
    if not before:
        compat.uninstall()


@pytest.mark.parametrize("path", [*ANSWERED, EXAMPLE])
def test_every_entry_imports_and_resolves(path: str):
    module = importlib.import_module(path)
    for name in OLD[path].names:
        assert hasattr(module, name), name
    for name in OLD[path].device:
        assert isinstance(getattr(module, name), DeviceName)


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


def test_attributes_of_the_root_are_modules_that_were_not_imported():
    import neuronx_distributed as nxd  # pyright: ignore[reportMissingImports]

    assert nxd.trainer.model.NxDModel is nxd_infer.modules.nxd_model.NxDModel
    assert nxd.utils.utils.hardware("inf2") == nxd.utils.utils.hardware.TRN1
    assert nxd.parallel_layers.parallel_state.rmsg("x").endswith("x") and not hasattr(nxd.utils, "nothing")


@pytest.mark.parametrize("installed", [False, True])
def test_a_part_of_optimum(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The package may be there without its part for Neuron, and is never hidden."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "optimum"]:
        monkeypatch.delitem(sys.modules, name)
    if installed:
        (tmp_path / "optimum").mkdir()
        (tmp_path / "optimum/__init__.py").write_text("REAL = 1")
        monkeypatch.syspath_prepend(tmp_path)
    taken: dict = {}
    exec("from optimum.neuron.distributed import ParallelizersManager as found\nimport optimum", taken)
    assert taken["found"] is nxd_infer.distributed.ParallelizersManager
    assert hasattr(taken["optimum"], "REAL") == installed and not hasattr(taken["optimum"].neuron, "NeuronModel")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("optimum.neuron.models")
    for name in [name for name in sys.modules if name.partition(".")[0] == "optimum"]:
        del sys.modules[name]


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
        with pytest.raises(DeviceOnlyError, match=r"example\.module\.kernel cannot be used here: call other\(\)"):
            exec(use, {"kernel": kernel})
    assert not isinstance(1, kernel) and (kernel | None) is not None
