"""The contract with torch_neuronx, its compiler and its runtime: the package's code has what it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from nxd_infer.backends.neuron import runtime
from tests.support.neuron.contract import contract, installed_differences, ours
from tests.support.neuron.machines import HAS_XLA, NEEDS_XLA, neuron_machine


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
    code = own.read_text()
    assert set(re.findall(r"(?<![\w\"])torch\.(?:classes|ops)\.[\w.]+", code)) == {"torch.ops.neuron._parallel_load"}
    methods = set(re.findall(r"\bmodel\.(\w+)\(", code))
    assert methods == {"initialize", "is_initialized", "forward"}
    known = {symbol["name"] for symbol in contract()["symbols"]}
    assert {f"torch.classes.neuron.SPMDModel.{one}" for one in methods} <= known


@pytest.mark.skipif(not HAS_XLA, reason=NEEDS_XLA)
def test_what_is_installed_has_these_signatures(tmp_path: Path) -> None:
    """torch_neuronx, the real one or the stand-in."""
    with neuron_machine(tmp_path):
        runtime.load()
        assert installed_differences(contract()) == []
