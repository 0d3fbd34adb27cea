"""``nxd_infer.compat``: the names of neuronx_distributed, and a real package that is never hidden."""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nxd_infer
from nxd_infer import compat
from nxd_infer.trace import BucketModelConfig

NAMES = ("neuronx_distributed", "optimum", "torch_neuronx")


def forget() -> None:
    compat.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """And other tests of this process keep the names that they have."""
    finders, modules = sys.meta_path[:], {name: sys.modules[name] for name in sys.modules if name.startswith(NAMES)}
    forget()
    yield
    forget()
    sys.meta_path[:] = finders
    sys.modules.update(modules)


def package(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(folder)


def test_a_module_that_is_absent_is_named_under_both_names():
    compat.install()
    assert importlib.import_module("neuronx_distributed.parallel_layers.pad") is nxd_infer.parallel_layers.pad
    with pytest.raises(ModuleNotFoundError, match=r"nxd_infer\.nowhere") as caught:
        importlib.import_module("neuronx_distributed.nowhere.x")
    assert caught.value.name == "neuronx_distributed.nowhere"
    compat.uninstall()
    with pytest.raises(ModuleNotFoundError, match="No module named 'neuronx_distributed'"):
        importlib.import_module("neuronx_distributed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import neuronx_distributed.parallel_layer.layers", "did you mean parallel_layers?"),
        ("from neuronx_distributed.parallel_layers.layers import RowParallelLiner", "did you mean RowParallelLinear?"),
        ("import neuronx_distributed as nxd; nxd.utils.utils.hardwar", "did you mean hardware?"),
    ],
)
def test_a_misspelt_name_gets_the_right_one(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.py").write_text(text)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["compat", str(tmp_path / "a.py")])
    with pytest.raises((ImportError, AttributeError), match=re.escape(said)):
        compat.main()


def test_a_function_is_found_before_the_module_of_its_name():
    compat.install()
    trainer = importlib.import_module("neuronx_distributed.trainer")
    assert trainer.shutdown is nxd_infer.trainer.shutdown
    assert trainer.checkpoint.save_checkpoint is nxd_infer.save_checkpoint  # a module that ours has elsewhere


def test_a_real_package_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package(tmp_path, "neuronx_distributed", "REAL = 1\n", monkeypatch)
    with pytest.raises(compat.AliasError, match="force=True"):
        compat.install()
    assert importlib.import_module("neuronx_distributed").REAL == 1
    compat.install(force=True)
    compat.install()
    assert importlib.import_module("neuronx_distributed.parallel_layers.pad") is nxd_infer.parallel_layers.pad
    compat.uninstall()
    assert importlib.import_module("neuronx_distributed").REAL == 1


@pytest.mark.parametrize("real", [False, True])
def test_torch_neuronx_is_stood_in_for_where_it_is_absent_and_never_hidden(real: bool, tmp_path: Path, monkeypatch):
    assert importlib.util.find_spec("torch_neuronx") is None
    if real:
        package(tmp_path, "torch_neuronx", "class BucketModelConfig: pass\n", monkeypatch)
    compat.install()
    found = importlib.import_module("torch_neuronx")
    assert (found.BucketModelConfig is BucketModelConfig) is not real
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("torch_neuronx.nothing")
    assert caught.value.name == "torch_neuronx.nothing"
    compat.uninstall()
    assert ("torch_neuronx" in sys.modules) is real


SCRIPT = """
import sys
import neuronx_distributed as nxd
import neuronx_distributed.parallel_layers.layers as layers_module
import sibling  # which lies beside the script, and that is not where it is started
from neuronx_distributed.parallel_layers import layers, parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
import nxd_infer.parallel_layers.layers
assert layers is layers_module is nxd.parallel_layers.layers is nxd_infer.parallel_layers.layers
assert ColumnParallelLinear is layers.ColumnParallelLinear and nxd_infer.__spec__.name == "nxd_infer"
model = ColumnParallelLinear(4, 8 // parallel_state.get_tensor_model_parallel_size())
nxd.parallel_layers.save({"model": model.state_dict()}, sys.argv[1])
print("ran", __name__, len(sys.argv))
"""


def test_an_unchanged_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    (tmp_path / "sibling.py").touch()
    monkeypatch.setattr(sys, "argv", ["compat", str(script), str(out)])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    runpy.run_module("nxd_infer.compat", run_name="__main__")
    assert capsys.readouterr().out == "ran __main__ 2\n" and (out / "tp_rank_00_pp_rank_00").is_dir()


def test_usage(monkeypatch: pytest.MonkeyPatch):
    for words in ([], ["--help"], ["nowhere.py"]):
        monkeypatch.setattr(sys, "argv", ["compat", *words])
        with pytest.raises(SystemExit, match=r"usage: python -m nxd_infer\.compat script\.py") as caught:
            compat.main()
    assert "there is no 'nowhere.py'" in str(caught.value)
