"""The contract with torch_neuronx, its compiler and its runtime: the package's code has what it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nxd_infer.backends.neuron import runtime
from tests.support.neuron.contract import as_script, contract, installed_differences, of_class, ours
from tests.support.neuron.machines import HAS_XLA, NEEDS_XLA, REAL, neuron_machine


def test_the_package_uses_what_the_contract_says() -> None:
    assert ours() == contract()


def test_one_module_reaches_torch_neuronx_by_its_symbols() -> None:
    """No other one imports it, names its device or its classes; nothing imports libneuronxla."""
    own = Path(runtime.__file__)
    for path in own.parents[2].rglob("*.py"):
        text = path.read_text()
        imports = [
            ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not re.search(r"(import|from) (torch_neuronx|libneuronxla)\b", "\n".join(imports)), path
        assert path == own or not re.search(r"torch\.classes\.neuron|torch\.ops\.neuron|privateuseone", text), path
    code = own.read_text().partition("SYMBOLS = (")[2].partition("\n)\n")[2]
    assert set(re.findall(r"(?<![\w\"])torch\.(?:classes|ops)\.[\w.]+", code)) == {"torch.ops.neuron._parallel_load"}
    methods = set(re.findall(r"\bmodel\.(\w+)\(", code))
    assert methods == {"initialize", "is_initialized", "forward"}
    assert {f"torch.classes.neuron.SPMDModel.{one}" for one in methods} <= {symbol.name for symbol in runtime.SYMBOLS}


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


@pytest.mark.usefixtures("installed")
class TestInstalled:
    def test_what_is_installed_has_these_signatures(self) -> None:
        assert installed_differences(contract()) == []

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
