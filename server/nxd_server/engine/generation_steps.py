"""The steps in flight: the running one and, if the next one's tokens may be unknown, the next one too. With a pipeline
one per stage, of other choices each, and one that waits.

The outputs of a step are processed while the next one runs, so that ranks never wait for that. A choice that ends is
then still in the next step, whose output for it is ignored; with a pipeline it is in none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from nxd_server.engine.core.model import Model
from nxd_server.engine.core.scheduler import UNKNOWN, Row, Step
from nxd_server.engine.core.step_inputs import StepInputs, tokens_input
from nxd_server.engine.core.step_outputs import StepOutputs
from nxd_server.engine.core.step_runner import FATAL, StepRunner
from nxd_server.engine.request import Choice

log = logging.getLogger("nxd_server.engine")


def steps_in_flight(model: Model, known: bool) -> int:
    """Return how many steps the ranks may have at once. ``known``: tokens must be known before they are fed."""
    stages = model.manifest.pp_degree
    if stages > 1:
        return stages + 1 if model.arrays else 1
    return 2 if not known and steps_may_follow(model) else 1


def steps_may_follow(model: Model) -> bool:
    """Whether a step may begin while the previous one runs.

    The model must take arrays and run in processes, and its graphs must accept an unknown token and decode one token
    per row. With several ranks a core must be free: if the engine took a core from a rank during a step, all ranks
    would wait (2 % slower at tp 2 on two cores); between two steps they wait anyway. See docs/benchmarks.md.
    """
    tokens = [tokens_input(bucket) for bucket in model.manifest.buckets]
    unknown = all(spec.minimum is not None and spec.minimum <= UNKNOWN for spec in tokens)
    single = min(spec.shape[1] for spec in tokens) == 1
    free = model.manifest.tp_degree == 1 or model.spare_cores > 0
    return model.arrays and unknown and single and free


class GenerationSteps:
    """Begins and finishes the scheduler's steps, in order. ``refuse(choice, error)`` ends a choice that cannot be
    served; errors that end the ranks (FATAL) are raised."""

    def __init__(
        self,
        steps: StepRunner,
        inputs: Mapping[str, StepInputs],
        depth: int,
        fail: Callable[[Choice, Exception], None],
        refuse: Callable[[Choice, Exception], None],
    ):
        """``depth``: most steps in flight. ``fail(choice, error)`` ends a choice before its step begins."""
        self._steps, self.inputs, self._fail, self._refuse = steps, inputs, fail, refuse
        self._in_flight = steps.in_flight
        self.depth = depth

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        return len(self._in_flight) >= self.depth

    def begin(self, step: Step[Choice]) -> Step[Choice] | None:
        """Give ``step`` to the ranks; return the part that they got, if any."""
        inputs = self.inputs[step.graph.name]
        rows: list[Row[Choice]] = []
        for row in step.rows:
            try:
                inputs.put(len(rows), row, row.sequence.sampler)
            except Exception as error:  # one request's values must not stop the others' step
                self._fail(row.sequence, error)
                continue
            rows.append(row)
        for index in range(len(rows), inputs.batch):
            inputs.clear(index)
        if not rows:
            return None
        if len(rows) < len(step.rows):
            step = Step(step.kind, step.graph, tuple(rows))
        try:
            self._steps.begin(step.graph.name, inputs.tensors, step)
        except FATAL:
            raise
        except Exception as error:
            self._refuse_all(step, error)
            return None
        return step

    def finish(self) -> tuple[Step[Choice], StepOutputs, float] | None:
        """Wait for the oldest step in flight; return it, its outputs and its seconds; None if it was rejected."""
        step: Step[Choice] = self._in_flight[0].work
        useful = sum(row.length for row in step.rows if not row.sequence.ended)
        try:
            outputs, seconds = self._steps.finish(useful, step.graph.batch * step.graph.length - useful)
        except FATAL:
            raise
        except Exception as error:
            self._refuse_all(step, error)
            return None
        return step, StepOutputs(outputs, step.graph.batch), seconds

    def _refuse_all(self, step: Step[Choice], error: Exception) -> None:
        """Fail these rows because the graph rejected them; the ranks and the other requests continue."""
        log.error("a step of %s failed", step.graph.name, exc_info=error)
        for row in step.rows:
            self._refuse(row.sequence, error)
