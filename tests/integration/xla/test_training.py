"""Training on XLA's devices, every replica in its own thread: the losses are those of plain PyTorch on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.xla.rig import in_a_process, require

require()

from tests.integration.xla.run_training import STEPS, WAYS  # noqa: E402


@pytest.fixture(scope="module", params=WAYS, ids=lambda world: f"{world} replicas")
def trained(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    return request.param, in_a_process("run_training", str(request.param))


def test_losses_are_those_of_degree_1_on_the_cpu(trained: tuple[int, dict[str, Any]]) -> None:
    world, found = trained
    assert found["xla"].keys() == WAYS[world].keys()
    free = [losses[-1] for way, losses in found["cpu"].items() if not WAYS[world][way].clips]
    for way, losses in found["xla"].items():
        # clipping changes what is learned, so that it would be seen if it did nothing
        assert not WAYS[world][way].clips or all(abs(found["cpu"][way][-1] - other) > 1e-3 for other in free)
        assert len(losses) == STEPS and losses[-1] < losses[0]
        assert losses == pytest.approx(found["cpu"][way], abs=1e-5), way


def test_no_operator_leaves_the_device(trained: tuple[int, dict[str, Any]]) -> None:
    """But for a value that is read."""
    assert trained[1]["left"] == ["aten::_local_scalar_dense"]
