"""Dynamic batching of one-shot models: encoders, classifiers, any traced model.

Requests share a step only where the manifest says that rows are independent: every input may be padded on dimension 0
and every output is cut there. Then waiting requests are put together up to the largest batch of the length that the
oldest one needs, after ``max_delay_ms`` at the latest; shorter ones are padded with the declared values, and each
caller gets the rows and lengths it sent. Any other model runs one request at a time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from nxd_infer.artifact.manifest import BucketSpec, Manifest
from nxd_infer.errors import ModelConfigError, NxdError, RankFailedError
from nxd_infer.runtime.router import Router, cut, fill, lawful
from nxd_server.engine.core.step_costs import Graph, StepCosts
from nxd_server.engine.engine_thread import FATAL, ModelWorker
from nxd_server.engine.events import EngineStats
from nxd_server.engine.oneshot_batching import (
    batches_rows,
    bucket_fits,
    check_rows,
    elements,
    row_elements,
    row_shape,
)
from nxd_server.engine.weight_swap import WholeRequest
from nxd_server.errors import DeadlineExceededError, GenerationError, summary

Outputs = dict[str, torch.Tensor]


@dataclass(eq=False)
class Job:
    """One request. ``alone``: it was in a step that failed, and shares none any more."""

    inputs: dict[str, torch.Tensor]
    future: Future
    rows: int
    arrived: float
    deadline: float | None
    convert: Callable[[Outputs], Any]
    whole: WholeRequest
    alone: bool = False


class OneShotEngine(ModelWorker):
    """Serve one model whose calls are independent of each other."""

    def __init__(
        self,
        model: Any,
        *,
        max_delay_ms: float = 2.0,
        max_queued_requests: int = 256,
        restart_limit: int = 1,
        restart_window: float = 600.0,
        idle_probe: float | None = 5.0,
        on_state: Callable[[str], None] | None = None,
        costs: Mapping[str, float] | None = None,
    ):
        """``max_delay_ms``: how long a request may wait for others to share its step; ``costs``: seconds by bucket in
        place of what is measured. Raises ModelConfigError for an artifact traced for generation."""
        manifest: Manifest = model.manifest
        if manifest.metadata.get("task") == "generate":
            raise ModelConfigError("the artifact was traced for generation: use Engine")
        if max_delay_ms < 0:
            raise ValueError(f"max_delay_ms must be at least 0, got {max_delay_ms}")
        self.batches = batches_rows(manifest)
        capacity = max((bucket.inputs[0].shape[0] for bucket in manifest.buckets), default=1) if self.batches else 1
        super().__init__(
            model,
            max_queued_requests=max_queued_requests,
            capacity=capacity,
            restart_limit=restart_limit,
            restart_window=restart_window,
            idle_probe=None if manifest.states else idle_probe,  # a probe would change a model's own states
            on_state=on_state,
        )
        self._kernel = "bucket-kernel" in manifest.requires
        self._router = Router(manifest.buckets)
        self._max_delay = max_delay_ms / 1000
        self.costs = StepCosts((Graph(bucket.name, 1, elements(bucket)) for bucket in manifest.buckets), costs)
        self._arrivals: deque[Job] = deque()
        self._pending: list[Job] = []
        self._current: list[Job] = []

    # --- callers' side ----------------------------------------------------------------------------------

    def submit(
        self,
        inputs: Mapping[str, torch.Tensor],
        *,
        timeout: float | None = None,
        convert: Callable[[Outputs], Any] | None = None,
        continuing: bool = False,
        whole: WholeRequest | None = None,
    ) -> Future:
        """Queue one call; the future gives the outputs by name, cut to this request's rows and lengths.

        Args:
            inputs: tensors by name, with the traced dtypes, no larger than a bucket where padding is declared, and
                equal to it elsewhere; inputs with a default may be left out.
            timeout: seconds until the future fails with DeadlineExceededError, unless its step has begun.
            convert: applied to the outputs in the engine's thread; the future gives what it returns.
            continuing: part of a request that has run in part already: taken while draining, and however many wait for
                new weights, too.
            whole: the request that this is a part of, all of which the same weights answer.

        A future that is cancelled before its step begins costs nothing. Raises InputMismatchError or BucketError (with
        the bucket table), RequestError, QueueFullError or EngineUnavailableError at once.
        """
        tensors = dict(inputs)
        try:
            self._check_timeout(timeout)
            if not self._kernel:
                self._router.route((), tensors)
            if self.batches:
                check_rows(tensors)
        except (NxdError, ValueError):
            self._rejected["invalid"] += 1
            raise
        now = time.monotonic()
        rows = next(iter(tensors.values())).shape[0] if self.batches and tensors else self.capacity
        future: Future = Future()
        deadline = None if timeout is None else now + timeout
        job = Job(tensors, future, rows, now, deadline, convert or dict, whole or WholeRequest())
        with self._wake:
            self._check_open(continuing)
            if not (continuing and self.gate.wanted):  # those that fill the queue wait for this request to end
                self._check_queue(1)
            self._book_taken(1)
            self.gate.take(job.whole, 1)
            self._arrivals.append(job)
            self._wake.notify_all()
        if whole is None:
            job.whole.close()
        return future

    def stats(self) -> EngineStats:
        stats = super().stats()
        stats.running = len(self._current)
        stats.waiting = max(0, stats.waiting - stats.running)
        return stats

    # --- the engine's thread ----------------------------------------------------------------------------

    def _has_news(self) -> bool:
        return bool(self._arrivals)

    def _wait_seconds(self) -> float:
        moments = [job.deadline for job in self._pending if job.deadline is not None]
        moments += [job.arrived + self._max_delay for job in self._ready()[:1]]
        return max(0.0, min(moments, default=math.inf) - time.monotonic())

    def _ready(self) -> list[Job]:
        """Those of the waiting that may begin, oldest first."""
        if not self.gate.wanted:
            return self._pending
        return [job for job in self._pending if self.gate.may_begin(job.whole)]

    def _work(self) -> bool:
        with self._wake:
            self._pending.extend(self._arrivals)
            self._arrivals.clear()
        now = time.monotonic()
        for job in [job for job in self._pending if job.deadline is not None and job.deadline <= now]:
            self._pending.remove(job)
            seconds = now - job.arrived
            self._fail(job, DeadlineExceededError(f"the request waited for {seconds:.3g} s and had no more time"))
        self._drop_cancelled()
        ready = self._ready()
        if not ready:
            return False
        if self._kernel:
            self._take(ready[:1])
            self._run_kernel(self._current[0])
            return True
        bucket, group, room = self._group(ready)
        full = sum(job.rows for job in group) >= room or len(group) < len(ready)
        if self.batches and not full and now - group[0].arrived < self._max_delay and not self._draining:
            return False
        self._take(group)
        self._run_group(bucket)
        return True

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._pending if job.future.cancelled()]:
            self._pending.remove(job)
            job.future.set_running_or_notify_cancel()
            self._book_end("cancelled", 0.0)
            self._told(job)

    def _take(self, jobs: list[Job]) -> None:
        """Move ``jobs`` into the step; those that were cancelled at the last moment drop out."""
        self._current = []
        for job in jobs:
            self._pending.remove(job)
            if job.future.running() or job.future.set_running_or_notify_cancel():
                self.gate.begin(job.whole)
                self._current.append(job)
            else:
                self._book_end("cancelled", 0.0)
                self._told(job)

    def _group(self, ready: list[Job]) -> tuple[BucketSpec, list[Job], int]:
        """The bucket to run next, who is in it (the oldest, and others that share its names and fit), and how many
        rows there is room for at most."""
        head = ready[0]
        fitting = [bucket for bucket in self.model.manifest.buckets if bucket_fits(bucket, head.inputs)]
        if not self.batches or head.alone:
            return min(fitting, key=elements), [head], 1
        # The smallest length that takes the oldest; among its batch sizes the one with the most rows per second.
        shape = row_shape(min(fitting, key=lambda bucket: (row_elements(bucket), bucket.inputs[0].shape[0])))
        buckets = [bucket for bucket in fitting if row_shape(bucket) == shape]
        buckets.sort(key=lambda bucket: bucket.inputs[0].shape[0])
        widest = buckets[-1]
        room = widest.inputs[0].shape[0]
        group, rows = [], 0
        for job in ready:
            same = job.inputs.keys() == head.inputs.keys()  # and none is to go alone: those stand before all others
            if same and rows + job.rows <= room and bucket_fits(widest, job.inputs):
                group.append(job)
                rows += job.rows
                if rows >= room:
                    break

        def taken(bucket: BucketSpec) -> list[Job]:
            jobs, left = [], bucket.inputs[0].shape[0]
            for job in group:
                if job.rows > left:
                    break
                jobs.append(job)
                left -= job.rows
            return jobs

        best = self.costs.cheapest(buckets, lambda bucket: sum(job.rows for job in taken(bucket)))
        return best, taken(best), room

    def _run_group(self, bucket: BucketSpec) -> None:
        jobs = self._current
        if not jobs:
            return
        rows = sum(job.rows for job in jobs)
        total = bucket.inputs[0].shape[0] if self.batches and bucket.inputs else 1
        try:
            outputs, seconds = self.steps.execute(bucket.name, self._tensors(bucket, jobs), rows, total - rows)
        except FATAL:
            raise
        except Exception as error:  # nothing is lost but this step
            self._current = []
            if len(jobs) == 1:
                self._fail(jobs[0], _failure(error))
                return
            self._separate(jobs)
            return
        self._current = []
        self.costs.observe(bucket.name, seconds)
        values = [outputs[spec.name] for spec in bucket.outputs]
        start = 0
        for job in jobs:
            own = [value.narrow(0, start, job.rows) for value in values] if self.batches else values
            start += job.rows
            mine = cut(bucket, job.inputs, own)
            # Copies: one caller's result must not keep everybody's rows alive, nor be shared memory with them.
            self._succeed(job, {spec.name: value.clone() for spec, value in zip(bucket.outputs, mine, strict=True)})

    def _tensors(self, bucket: BucketSpec, jobs: list[Job]) -> Outputs:
        """The inputs of all ``jobs`` in the bucket's shapes."""
        tensors = {}
        for spec in bucket.inputs:
            if spec.name not in jobs[0].inputs:
                continue
            tensor = torch.empty(spec.shape, dtype=spec.torch_dtype)
            if not self.batches:
                fill(tensor, spec, jobs[0].inputs[spec.name])
            else:
                start = 0
                for job in jobs:
                    fill(tensor.narrow(0, start, job.rows), spec, job.inputs[spec.name])
                    start += job.rows
                rest = tensor.narrow(0, start, tensor.shape[0] - start)
                fill(rest, spec, rest.new_empty([0, *rest.shape[1:]]))
            tensors[spec.name] = tensor
        return tensors

    def _run_kernel(self, job: Job) -> None:
        """A model with its user's own routing: called exactly as its user would."""
        try:
            with self.steps.visible(""):
                result = self.model.forward(**job.inputs)
        except FATAL:
            raise
        except Exception as error:
            self._current = []
            self._fail(job, _failure(error))
            return
        self.steps.worked = True
        self._current = []
        if not isinstance(result, dict):
            names = [spec.name for spec in self.model.manifest.buckets[0].outputs]
            result = dict(zip(names, result if isinstance(result, (tuple, list)) else [result], strict=False))
        self._succeed(job, result)

    # --- ends -------------------------------------------------------------------------------------------

    def _succeed(self, job: Job, outputs: Outputs) -> None:
        try:
            result = job.convert(outputs)
        except Exception as error:
            self._fail(job, GenerationError(f"the outputs could not be converted: {error}"))
            return
        self._book_end("done", time.monotonic() - job.arrived)
        job.future.set_result(result)
        self._told(job)

    def _fail(self, job: Job, error: Exception) -> None:
        if job.future.cancelled():
            outcome = "cancelled"
        else:
            outcome = "deadline" if isinstance(error, DeadlineExceededError) else "error"
        self._book_end(outcome, time.monotonic() - job.arrived)
        if job.future.running() or job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)
        self._told(job)

    def _told(self, job: Job) -> None:
        self.gate.end(job.whole)
        self._book_told()

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            jobs = [*self._current, *self._pending, *self._arrivals]
            self._current, self._pending = [], []
            self._arrivals.clear()
        for job in jobs:
            self._fail(job, error)

    def _ranks_lost(self, error: BaseException) -> None:
        """A graph that raised did so over the step's own requests: only they are in doubt, and one alone is guilty."""
        if not isinstance(error, RankFailedError):
            super()._ranks_lost(error)
            return
        suspects, self._current = self._current, []
        if len(suspects) == 1:
            failure = GenerationError(f"the model failed on this request's inputs: {summary(error)}")
            failure.__cause__ = error
            self._fail(suspects[0], failure)
            return
        self._separate(suspects)

    def _separate(self, jobs: list[Job]) -> None:
        """One of ``jobs`` is at fault, and nobody knows which: each goes alone, before all others."""
        for job in jobs:
            job.alone = True
        self._pending = [*jobs, *self._pending]

    def _padding_inputs(self, bucket: str) -> Outputs:
        spec = self.model.manifest.bucket(bucket)
        return {one.name: lawful(one) for one in spec.inputs if one.default is None}

    def _warmed(self) -> None:
        if self.model.manifest.states:
            self.model.reset_states()


def _failure(error: Exception) -> NxdError:
    return error if isinstance(error, NxdError) else GenerationError(f"the step failed: {error}")
