"""``nxd_infer.compat``: the names of neuronx_distributed, and a real package that is never hidden."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nxd_infer
from nxd_infer import compat
from nxd_infer.trace import BucketModelConfig

NAMES = ("neuronx_distributed", "torch_neuronx")


def forget() -> None:
    compat.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    forget()
    yield
    forget()


def package(folder: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(folder)


def test_a_module_that_is_absent_is_named_under_both_names():
    compat.install()
    assert importlib.import_module("neuronx_distributed") is nxd_infer
    with pytest.raises(ModuleNotFoundError, match=r"nxd_infer\.kernels") as caught:
        importlib.import_module("neuronx_distributed.kernels")
    assert caught.value.name == "neuronx_distributed.kernels"
    compat.uninstall()
    with pytest.raises(ModuleNotFoundError, match="No module named 'neuronx_distributed'"):
        importlib.import_module("neuronx_distributed")


def test_a_real_package_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package(tmp_path, "neuronx_distributed", "REAL = 1\n", monkeypatch)
    with pytest.raises(compat.AliasError, match="force=True"):
        compat.install()
    assert importlib.import_module("neuronx_distributed").REAL == 1
    compat.install(force=True)
    compat.install()
    assert importlib.import_module("neuronx_distributed.parallel_layers") is nxd_infer.parallel_layers
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
        importlib.import_module("torch_neuronx.xla_impl")
    assert caught.value.name == "torch_neuronx.xla_impl"
    compat.uninstall()
    assert ("torch_neuronx" in sys.modules) is real


def test_usage(monkeypatch: pytest.MonkeyPatch):
    for words in ([], ["--help"], ["nowhere.py"]):
        monkeypatch.setattr(sys, "argv", ["compat", *words])
        with pytest.raises(SystemExit, match=r"usage: python -m nxd_infer\.compat script\.py") as caught:
            compat.main()
    assert "there is no 'nowhere.py'" in str(caught.value)


def test_what_is_not_here_says_what_does_its_work():
    with pytest.raises(ImportError, match="parallel_model_trace does its work"):
        from nxd_infer.trace import ModelBuilder  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
