"""Schedules are complete, end, keep as many activations as promised, and leave the bubble that they should."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.pipeline import cuts_of
from nxd_infer.pipeline.schedule import Action, bubble, forward_only, schedule, timetable


def cases():
    for ranks, microbatches in itertools.product((1, 2, 3, 8), (1, 2, 3, 5, 12)):
        yield "1f1b", ranks, microbatches, 1
        yield "gpipe", ranks, microbatches, 1
        yield "zero-bubble", ranks, microbatches, 1
        for chunks in (2, 3):
            yield "interleaved", ranks, microbatches, chunks


def in_flight(actions: list[Action]) -> int:
    """The most passes of a rank whose activations are there at once."""
    now = most = 0
    for action in actions:
        now += -1 if action.backward else 1
        most = max(most, now)
    return most


def test_every_pass_runs_once_in_order_and_all_end():
    for kind, ranks, microbatches, chunks in cases():
        actions = schedule(kind, ranks, microbatches, chunks)
        stages = ranks * chunks
        parts = [(False, False), (True, False), (True, True)][: 3 if kind == "zero-bubble" else 2]
        wanted = {Action(s, i, *part) for s in range(stages) for i in range(microbatches) for part in parts}
        found = [action for mine in actions for action in mine]
        assert len(found) == len(wanted) and set(found) == wanted
        assert all(action.stage % ranks == rank for rank, mine in enumerate(actions) for action in mine)
        for mine in actions:
            for stage, kind_of_pass in {(action.stage, action.name[0]) for action in mine}:
                order = [a.microbatch for a in mine if (a.stage, a.name[0]) == (stage, kind_of_pass)]
                assert order == list(range(microbatches))
        timetable(actions, [1.0] * stages, [2.0] * stages)
        timetable(forward_only(actions), [1.0] * stages, [2.0] * stages)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 12)])
def test_bubbles_are_those_of_the_formulas(ranks: int, microbatches: int):
    def share(kind: str, chunks: int) -> float:
        actions = schedule(kind, ranks, microbatches, chunks)
        return bubble(timetable(actions, [1.0 / chunks] * ranks * chunks, [2.0 / chunks] * ranks * chunks))

    assert share("1f1b", 1) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert share("gpipe", 1) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert share("interleaved", 2) == pytest.approx((ranks - 1) / (2 * microbatches + ranks - 1))
    actions = schedule("zero-bubble", ranks, microbatches)
    table = timetable(actions, [1.0] * ranks, [2.0] * ranks)
    assert max(span.end for spans in table for span in spans) == 3 * microbatches + ranks - 1, "a third remains"
    for mine in actions:
        now = [sum(-1 if a.late else not a.backward for a in mine[: end + 1]) for end in range(len(mine))]
        assert max(now) <= ranks + 1 and now[-1] == 0


def test_1f1b_keeps_as_many_activations_as_stages_follow():
    for rank, mine in enumerate(schedule("1f1b", 4, 8)):
        assert in_flight(mine) == 4 - rank
    assert [in_flight(mine) for mine in schedule("gpipe", 4, 8)] == [8] * 4


def test_a_circle_is_found():
    circle = [[Action(0, 0), Action(0, 0, True), Action(0, 1)], [Action(1, 1), Action(1, 0), Action(1, 0, True)]]
    with pytest.raises(ParallelConfigError, match="B0@0, F1@1 wait for each other"):
        timetable(circle, [1, 1], [1, 1])


@pytest.mark.parametrize(
    ("kind", "microbatches", "chunks", "message"),
    [
        ("zigzag", 4, 1, "schedule must be one of '1f1b', 'gpipe', 'interleaved', 'zero-bubble', got 'zigzag'"),
        ("1f1b", 0, 1, "num_microbatches must be at least 1, got 0"),
        ("1f1b", 4, 2, "schedule '1f1b' with virtual_pipeline_size=2"),
        ("interleaved", 4, 1, "the interleaved schedule needs 2 or more"),
    ],
)
def test_what_there_is_not(kind: str, microbatches: int, chunks: int, message: str):
    with pytest.raises(ParallelConfigError, match=message):
        schedule(kind, 2, microbatches, chunks)


def test_a_chosen_partition_is_logged_with_its_imbalance(caplog: pytest.LogCaptureFixture):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)], nn.Linear(4, 8))
    with caplog.at_level("INFO"):
        cuts = cuts_of(model, PipelineOptions({"auto_partition": True, "transformer_layer_cls": "Linear"}), 2)
    # Costs of 16, 16, 16 | 16, 32: both halves are equal.
    (said,) = (record.getMessage() for record in caplog.records)
    assert cuts == ["2"]
    assert said == "pipeline_cuts: ['2']; the most expensive stage works 0.0% longer than an equal share"
