"""The contract with torch_neuronx, its compiler and its runtime: the package's code has what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nxd_infer.backends.neuron import runtime
from tests.support.neuron.contract import as_script, contract, installed_differences, of_class, ours
from tests.support.neuron.machines import HAS_XLA, NEEDS_XLA, REAL, neuron_machine


def test_the_package_uses_what_the_contract_says() -> None:
    assert ours() == contract()


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
