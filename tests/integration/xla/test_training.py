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
    for way, losses in found["xla"].items():
        assert len(losses) == STEPS and losses[-1] < losses[0]
        assert losses == pytest.approx(found["cpu"][way], abs=1e-5), way


def test_no_operator_leaves_the_device(trained: tuple[int, dict[str, Any]]) -> None:
    """But for a value that is read."""
    assert trained[1]["left"] == ["aten::_local_scalar_dense"]


def test_clipping_changes_what_is_learned(trained: tuple[int, dict[str, Any]]) -> None:
    """So that it is seen where it does nothing."""
    world, found = trained
    clipped = {way for way in WAYS[world] if WAYS[world][way].clips}
    free = [found["cpu"][way] for way in WAYS[world] if way not in clipped]
    assert clipped and all(abs(found["cpu"][way][-1] - other[-1]) > 1e-3 for way in clipped for other in free)
