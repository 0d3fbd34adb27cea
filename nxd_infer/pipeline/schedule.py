"""Schedules: in which order a rank runs the forward and backward passes of its stages. Pure functions.

Rank ``r`` of ``p`` has the stages ``r, r + p, r + 2p, ...``: one, or with an interleaved schedule several (*chunks*).
A pass of stage ``s`` can run when stage ``s - 1`` has run forward, or ``s + 1`` backward, for the same microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nxd_infer.errors import ParallelConfigError

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Action:
    """One pass: the forward or the backward of a microbatch through a stage."""

    stage: int
    microbatch: int
    backward: bool = False
    late: bool = False
    """Only the rest of the backward: gradients of weights, which no other stage waits for."""

    @property
    def name(self) -> str:
        return f"{'W' if self.late else 'B' if self.backward else 'F'}{self.microbatch}"

    def __str__(self) -> str:
        return f"{self.name}@{self.stage}"


@dataclass(frozen=True)
class Span:
    """An action with its start and its end in a timetable, in any unit of time."""

    action: Action
    start: float
    end: float


def schedule(kind: str, ranks: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """Return the actions of every rank, in order.

    ``"gpipe"``: all forward passes, then all backward passes. ``"1f1b"``: after ``ranks - rank`` forward passes, each
    is followed by a backward pass, so that a rank keeps the activations of so many microbatches. ``"interleaved"``:
    1F1B over several chunks a rank, which fill the bubble of each other. ``"zero-bubble"``: 1F1B whose backward passes
    are in two parts, of which the second one fills the bubble.

    Raises ParallelConfigError for another name, and for chunks that the schedule does not take.
    """
    if kind not in SCHEDULES:
        raise ParallelConfigError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {kind!r}")
    if microbatches < 1:
        raise ParallelConfigError(f"num_microbatches must be at least 1, got {microbatches}")
    if (chunks > 1) != (kind == "interleaved"):
        raise ParallelConfigError(
            f"schedule {kind!r} with virtual_pipeline_size={chunks}: the interleaved schedule needs 2 or more, the "
            "others 1"
        )
    if kind == "interleaved":
        return [_interleaved(rank, ranks, microbatches, chunks) for rank in range(ranks)]
    if kind == "zero-bubble":
        return _zero_bubble(ranks, microbatches)
    found = []
    for rank in range(ranks):
        ahead = microbatches if kind == "gpipe" else min(microbatches, ranks - rank - 1)
        forward = [Action(rank, i) for i in range(microbatches)]
        backward = [Action(rank, i, True) for i in range(microbatches)]
        found.append(_one_by_one(forward, backward, ahead))
    return found


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Microbatches go through the chunks in groups as large as the pipeline is long; the last group may be smaller.

    The order is made for full groups. Leaving the missing microbatches out cannot stop the others, as no pass waits for
    one of another microbatch.
    """
    full = microbatches + -microbatches % ranks
    groups = [range(first, first + ranks) for first in range(0, full, ranks)]
    stages = [rank + ranks * chunk for chunk in range(chunks)]
    forward = [Action(stage, i) for group in groups for stage in stages for i in group]
    backward = [Action(stage, i, True) for group in groups for stage in reversed(stages) for i in group]
    ahead = min(len(forward), 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
    return [one for one in _one_by_one(forward, backward, ahead) if one.microbatch < microbatches]


def _zero_bubble(ranks: int, microbatches: int) -> list[list[Action]]:
    """Every rank does what it can, when all passes take one tick: a backward pass, else a forward pass, else weights.

    It is as far ahead as with 1F1B. A microbatch is kept until its weights are done: up to one more than 1F1B's first
    rank keeps.
    """
    forward, backward, late = ([0] * ranks for _ in range(3))
    found: list[list[Action]] = [[] for _ in range(ranks)]
    while any(done < microbatches for done in late):
        ready = []
        for rank in range(ranks):
            i, j, k = forward[rank], backward[rank], late[rank]
            if j < i and (rank == ranks - 1 or j < backward[rank + 1]):
                ready.append((backward, Action(rank, j, True)))
            elif (
                i < microbatches and (rank == 0 or i < forward[rank - 1]) and i - j < ranks - rank and i - k < ranks + 1
            ):
                ready.append((forward, Action(rank, i)))
            elif k < j:
                ready.append((late, Action(rank, k, True, True)))
        for count, action in ready:
            count[action.stage] += 1
            found[action.stage].append(action)
    return found


def _one_by_one(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """``ahead`` forward passes, then a forward and a backward pass by turns, then the other backward passes."""
    steady = len(forward) - ahead
    pairs = [one for pair in zip(forward[ahead:], backward[:steady], strict=True) for one in pair]
    return [*forward[:ahead], *pairs, *backward[steady:]]


def forward_only(actions: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Return the forward passes of a schedule, for evaluation."""
    return [[action for action in mine if not action.backward] for mine in actions]


def timetable(
    actions: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float]
) -> list[list[Span]]:
    """Return when every action starts and ends, for the cost of each stage's passes, as soon as it can.

    Of a backward pass in two parts each takes half of its cost.
    Raises ParallelConfigError if the actions wait for each other in a circle.
    """
    last = len(forward) - 1
    parts = 2 if any(action.late for mine in actions for action in mine) else 1
    ended: dict[Action, float] = {}
    found: list[list[Span]] = [[] for _ in actions]
    while any(len(done) < len(mine) for done, mine in zip(found, actions, strict=True)):
        moved = False
        for done, mine in zip(found, actions, strict=True):
            while len(done) < len(mine):
                action = mine[len(done)]
                before = waits_for(action, last)
                if any(one not in ended for one in before):
                    break
                start = max([done[-1].end if done else 0.0, *(ended[one] for one in before)])
                cost = backward[action.stage] / parts if action.backward else forward[action.stage]
                ended[action] = start + cost
                done.append(Span(action, start, start + cost))
                moved = True
        if not moved:
            waiting = [str(mine[len(done)]) for done, mine in zip(found, actions, strict=True) if len(done) < len(mine)]
            raise ParallelConfigError(f"the schedule never ends: {', '.join(waiting)} wait for each other")
    return found


def waits_for(action: Action, last_stage: int) -> list[Action]:
    """Return the passes of other stages, and of its own stage, that must have run before ``action``."""
    stage, i = action.stage, action.microbatch
    if action.late:
        return [Action(stage, i, True)]
    if not action.backward:
        return [Action(stage - 1, i)] if stage else []
    return [Action(stage, i)] + ([Action(stage + 1, i, True)] if stage < last_stage else [])


def bubble(table: Sequence[Sequence[Span]]) -> float:
    """Return the share of the ranks' time, from the first start to the last end, in which they wait."""
    spans = [span for mine in table for span in mine]
    whole = (max(span.end for span in spans) - min(span.start for span in spans)) * len(table)
    return 1 - sum(span.end - span.start for span in spans) / whole if whole else 0.0
