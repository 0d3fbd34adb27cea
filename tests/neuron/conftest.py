"""On a real Neuron machine, signatures come first: where they are other ones, nothing else is tried."""

from __future__ import annotations

import pytest

from nxd_infer.backends.neuron import runtime
from tests.neuron.contract import contract, installed_differences
from tests.neuron.machines import REAL


@pytest.fixture(scope="session", autouse=True)
def real_signatures() -> None:
    if REAL:
        runtime.load()
        if found := installed_differences(contract()):
            pytest.exit("torch_neuronx is not that of the contract: " + "; ".join(found), 1)
