"""The contract with torch_neuronx, its compiler and its runtime: one change anywhere, and these tests fail."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nxd_infer.backends.neuron import compiler, cores, executable, lint, runtime, sdk
from tests.integration.neuron.contract import (
    as_script,
    changed,
    contract,
    differences,
    installed_differences,
    leaves,
    of_class,
)
from tests.integration.neuron.machines import HAS_XLA, NEEDS_XLA, REAL, neuron_machine

PACKAGE = Path(runtime.__file__).parents[2]


def test_the_package_uses_what_the_contract_says() -> None:
    assert differences(contract()) == []


@pytest.mark.parametrize("path", list(leaves(contract())), ids=lambda path: ".".join(map(str, path)))
def test_every_value_of_the_contract_is_held(path: tuple[Any, ...]) -> None:
    assert differences(changed(contract(), path))


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an environment variable": lambda patch: patch.setattr(cores, "VISIBLE", "NEURON_RT_CORES"),
    "the other environment variable": lambda patch: patch.setattr(cores, "COUNT", "NEURON_RT_CORES"),
    "a degree": lambda patch: patch.setitem(cores.DEGREES, "inf2", (1, 2, 3)),
    "a platform": lambda patch: patch.setitem(cores.DEGREES, "inf3", (1, 2)),
    "cores of a device": lambda patch: patch.setattr(cores, "CORES_A_DEVICE", 4),
    "where groups start": lambda patch: patch.setattr(cores, "groups", lambda given, degree: [range(1, 5)]),
    "a type": lambda patch: patch.setattr(lint, "TYPES", lint.TYPES | {"F64"}),
    "a rule": lambda patch: patch.delitem(lint.RULES, "NCC_EVRF013"),
    "bits": lambda patch: patch.setattr(executable, "LARGEST", 2**63 - 1),
    "a symbol": lambda patch: patch.setattr(runtime, "SYMBOLS", runtime.SYMBOLS[1:]),
    "the device": lambda patch: patch.setattr(runtime, "DEVICE", "neuron"),
    "a pinned flag": lambda patch: patch.setattr(compiler, "PINNED", {}),
    "the compiler's age": lambda patch: patch.setattr(compiler, "OLDEST", (2, 1)),
    "torch": lambda patch: patch.setattr(sdk, "TORCH", "2.8"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_change_of_the_package_is_seen(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[mutation](monkeypatch)
    assert differences(contract())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch_neuronx, the real one or the stand-in, imported."""
    if not HAS_XLA:
        pytest.skip(NEEDS_XLA)
    with neuron_machine(tmp_path_factory.mktemp("machine")):
        runtime.load()
        yield


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("dist_rpc.WorkerInfo", "(name: bytes, number: int)"),
        ("_nnapi.Compilation.run", "(self, inputs: list[Tensor], outputs: list[Tensor]) -> None"),
        ("quantized.Conv2dPackedParamsBase.transpose", "(self) -> bool"),
    ],
)
def test_signatures_of_real_classes_are_read(name: str, signature: str) -> None:
    """Classes of torch's own, in C++ as those of torch_neuronx are."""
    assert of_class(f"torch.classes.{name}") == as_script(signature)
    assert of_class(f"torch.classes.{name}") != as_script(signature.replace("(", "(other: int, "))
    assert of_class("torch.classes.dist_rpc.WorkerInfo.other") == "not there"


CHANGES = [
    *(f"model {method}" for method in ("__init__", "initialize", "forward", "is_initialized")),
    "config __init__",
    *(f"message {name}" for name in ("output_aliases_to", "SerializeToString")),
    *(f"tensor {name}" for name in ("checkpoint_key", "BFLOAT16", "INPUT_STATE")),
]
"""Of the stand-in: a method that gets another signature, or a field or value that is gone."""


@pytest.mark.usefixtures("installed")
class TestInstalled:
    def test_what_is_installed_has_these_signatures(self) -> None:
        assert installed_differences(contract()) == []

    def test_another_signature_would_be_seen(self) -> None:
        for number, symbol in enumerate(contract()["symbols"]):
            if symbol["name"] != "torch_neuronx":
                other = changed(contract(), ("symbols", number, "signature"))
                assert installed_differences(other), symbol["name"]

    @pytest.mark.skipif(REAL, reason="it changes the stand-in")
    @pytest.mark.parametrize("change", CHANGES)
    def test_a_change_of_the_stand_in_is_seen(self, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        parts = {
            "model": torch.classes.neuron.SPMDModel,
            "config": importlib.import_module("torch_neuronx").BucketModelConfig,
            "message": importlib.import_module(runtime.MESSAGE).MetaNeff,
            "tensor": importlib.import_module(runtime.MESSAGE).MetaTensor,
        }
        whose, name = change.split()
        if hasattr(parts[whose], "FIELDS") and name in parts[whose].FIELDS:
            monkeypatch.setattr(parts[whose], "FIELDS", [each for each in parts[whose].FIELDS if each != name])
        elif callable(getattr(parts[whose], name)):
            monkeypatch.setattr(parts[whose], name, lambda self, more: None)
        else:
            monkeypatch.delattr(parts[whose], name)
        assert installed_differences(contract())

    @pytest.mark.skipif(REAL, reason="it asks the stand-in")
    def test_what_is_not_in_the_contract_raises(self) -> None:
        import torch

        classes: Any = torch.classes.neuron
        with pytest.raises(RuntimeError, match="not in the contract"):
            _ = classes.LayoutTransformation
        made = torch.zeros(2, device="privateuseone:1")
        for use in (lambda: made + 1, lambda: made[0], made.clone, made.sum, made.item):
            with pytest.raises(RuntimeError, match="not in the contract"):
                use()
        with pytest.raises(RuntimeError, match="names its rank"):
            torch.zeros(2, device="privateuseone")


def test_one_module_reaches_torch_neuronx() -> None:
    """No other one imports it, names its device or its classes; nothing imports libneuronxla."""
    reaching = re.compile(r"torch\.classes|torch\.ops\.neuron|privateuseone")
    own = Path(runtime.__file__)
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        imported = {
            name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        assert not any(name.split(".")[0] in ("torch_neuronx", "libneuronxla") for name in imported), path
        assert path == own or not reaching.search(text), path


def test_it_calls_nothing_but_its_symbols() -> None:
    """Every attribute chain of runtime.py that leads into torch_neuronx is a symbol, or the start of one."""
    names = [symbol.name for symbol in runtime.SYMBOLS]
    text = Path(runtime.__file__).read_text()
    code = text.partition("SYMBOLS = (")[2].partition("\n)\n")[2]
    reached = set(re.findall(r"(?<![\w\"])torch\.(?:classes|ops)\.[\w.]+", code))
    assert reached == {"torch.ops.neuron._parallel_load"}
    methods = set(re.findall(r"\bmodel\.(\w+)\(", text))
    assert {f"torch.classes.neuron.SPMDModel.{method}" for method in methods} <= {*names}
    assert methods == {"initialize", "is_initialized", "forward"}
