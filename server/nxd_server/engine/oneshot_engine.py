"""The engine of one-shot models (encoders, classifiers, any traced model): calls share steps (dynamic batching).

Requests share a step only if the manifest declares that rows are independent: every input may be padded on dimension 0
and every output is cut there. Then waiting requests are batched, up to the largest batch of the length that the
first one needs, after at most ``max_delay_ms``. Shorter inputs are padded with the declared values, and each
caller gets the rows and lengths it sent. Any other model runs one request at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from nxd_infer.artifact.manifest import BUCKET_KERNEL_REQUIREMENT, BucketSpec, Manifest
from nxd_infer.errors import InputMismatchError, ModelConfigError, NxdError, RankFailedError
from nxd_infer.runtime.router import Router, cut, elements, fill, fits, lawful_inputs
from nxd_server.engine.admission import WholeRequest, check_timeout
from nxd_server.engine.engine_core import EngineCore, EngineStats
from nxd_server.engine.fair_queue import FairQueue
from nxd_server.engine.step_runner import FATAL, Graph, StepCosts
from nxd_server.errors import DeadlineExceededError, GenerationError, summary

if TYPE_CHECKING:
    from nxd_infer.runtime.model import TensorParallelModel

Outputs = dict[str, torch.Tensor]


@dataclass(eq=False)
class Job:
    """One request. ``alone``: it was in a step that failed, and does not share steps any more."""

    inputs: dict[str, torch.Tensor]
    future: Future
    rows: int
    arrived: float
    deadline: float | None
    convert: Callable[[Outputs], Any]
    whole: WholeRequest
    id: int
    cost: int
    """Its tokens: the numbers in its largest input."""
    work: int
    begun: bool = False
    alone: bool = False


class OneShotEngine(EngineCore):
    """Serve one model whose calls are independent of one another."""

    def __init__(
        self,
        model: TensorParallelModel,
        *,
        max_delay_ms: float = 2.0,
        costs: Mapping[str, float] | None = None,
        **core: Any,
    ):
        """``max_delay_ms``: how long a request may wait for others to share its step; ``costs``: seconds by bucket,
        used instead of measurements; ``core``: the options of :class:`EngineCore`. Raises ModelConfigError for an
        artifact traced for generation."""
        manifest: Manifest = model.manifest
        if manifest.metadata.get("task") == "generate":
            raise ModelConfigError("the artifact was traced for generation: use Engine")
        if max_delay_ms < 0:
            raise ValueError(f"max_delay_ms must be at least 0, got {max_delay_ms}")
        self.batches = batches_rows(manifest)
        step_costs = StepCosts((Graph(bucket.name, 1, elements(bucket)) for bucket in manifest.buckets), costs)
        if manifest.states:  # a probe would change them
            core["idle_probe"] = None
        super().__init__(
            model, step_costs, max(map(rows_of, manifest.buckets), default=1) if self.batches else 1, **core
        )
        self._kernel = BUCKET_KERNEL_REQUIREMENT in manifest.requires
        self._router = Router(manifest.buckets)
        self._max_delay = max_delay_ms / 1000
        self._arrivals: deque[Job] = deque()
        self._pending: FairQueue[Job] = FairQueue()
        self._ids = itertools.count(1)
        self._current: list[Job] = []
        self._proven: Callable[[], object] | None = None
        """Repeats the last step for requests that worked."""

    # --- requests: any thread -----------------------------------------------------------------------------

    def submit(
        self,
        inputs: Mapping[str, torch.Tensor],
        *,
        timeout: float | None = None,
        convert: Callable[[Outputs], Any] | None = None,
        continuing: bool = False,
        whole: WholeRequest | None = None,
    ) -> Future:
        """Queue one call; the future returns the outputs by name, cut to this request's rows and lengths.

        Args:
            inputs: tensors by name, with the traced dtypes; no larger than a bucket in padded dimensions and equal to
                it in the others; inputs with a default may be omitted.
            timeout: seconds until the future fails with DeadlineExceededError, unless its step has begun.
            convert: applied to the outputs in the engine's thread; the future returns its result.
            continuing: part of a request that has already run in part: accepted while draining, and regardless of how
                many requests wait for new weights.
            whole: the request that this call is a part of; the same weights answer all its parts.

        Cancelling the future before its step begins costs nothing. Raises InputMismatchError or BucketError (with
        the bucket table), RequestError, QueueFullError or EngineUnavailableError at once.
        """
        tensors, queue = dict(inputs), self.queue
        try:
            check_timeout(timeout)
            if not self._kernel:
                self._router.route((), tensors)
            rows = {name: tensor.shape[0] for name, tensor in tensors.items()} if self.batches else {}
            if len(set(rows.values())) > 1:
                counts = ", ".join(f"{name}: {count}" for name, count in rows.items())
                raise InputMismatchError(f"the inputs of one call have the same number of rows, got {counts}")
        except (NxdError, ValueError):
            queue.rejected["invalid"] += 1
            raise
        now = time.monotonic()
        future: Future = Future()
        deadline = None if timeout is None else now + timeout
        count = next(iter(rows.values()), queue.capacity)
        cost = max((tensor.numel() for tensor in tensors.values()), default=1)
        part_of = whole or WholeRequest()
        job = Job(tensors, future, count, now, deadline, convert or dict, part_of, next(self._ids), cost, cost)
        with self.lock:
            self.check_room(1, cost, whole=job.whole, timeout=timeout, continuing=continuing)
            queue.taken(job.whole, 1, cost, cost)
            self.gate.take(job.whole, 1)
            self._arrivals.append(job)
            self.lock.notify_all()
        if whole is None:
            job.whole.close()
        return future

    def stats(self) -> EngineStats:
        stats = super().stats()
        stats.running = len(self._current)
        stats.waiting = max(0, stats.waiting - stats.running)
        return stats

    # --- steps: the engine's thread -----------------------------------------------------------------------

    def _has_news(self) -> bool:
        return bool(self._arrivals)

    def _wait_seconds(self) -> float:
        moments = [job.deadline for job in self._pending if job.deadline is not None]
        moments += [job.arrived + self._max_delay for job in self._ready()]
        return max(0.0, min(moments, default=math.inf) - time.monotonic())

    def _ready(self) -> list[Job]:
        """Return the waiting jobs that may begin, in their order."""
        ready = [job for job in self._pending.in_order() if self.gate.may_begin(job.whole)]
        return sorted(ready, key=lambda job: not job.alone)

    def _work(self) -> bool:
        while self._arrivals:
            self._pending.add(self._arrivals.popleft())
        now = time.monotonic()
        for job in [job for job in self._pending if job.deadline is not None and job.deadline <= now]:
            self._pending.remove(job)
            seconds = now - job.arrived
            self._fail(job, DeadlineExceededError(f"the request waited for {seconds:.3g} s and had no more time"))
        for job in [job for job in self._pending if job.future.cancelled()]:
            self._pending.remove(job)
            job.future.set_running_or_notify_cancel()
            self._end(job, "cancelled")
        ready = self._ready()
        if not ready:
            return False
        if self._kernel:
            self._take(ready[:1])
            if self._current:  # it may have been cancelled at the last moment
                self._run_kernel(self._current[0])
            return True
        bucket, group, room = self._group(ready)
        full = sum(job.rows for job in group) >= room or len(group) < len(ready)
        oldest = min(job.arrived for job in group)
        if self.batches and not full and now - oldest < self._max_delay and not self.queue.draining:
            return False
        self._take(group)
        self._run_group(bucket)
        return True

    def _take(self, jobs: list[Job]) -> None:
        """Move ``jobs`` into the step, except those cancelled at the last moment."""
        self._current = []
        for job in jobs:
            self._pending.remove(job)
            if job.future.running() or job.future.set_running_or_notify_cancel():
                self.gate.begin(job.whole)
                self._current.append(job)
            else:
                self._end(job, "cancelled")
        new = [job for job in self._current if not job.begun]
        for job in new:
            job.begun = True
            self._pending.charge(job, job.cost)
        self.queue.begun(new, full=len(self._pending) > 0)

    def _group(self, ready: list[Job]) -> tuple[BucketSpec, list[Job], int]:
        """Return the bucket to run next, its jobs (the first, and others with the same inputs that fit), and the most
        rows that it has room for."""
        head = ready[0]
        fitting = [bucket for bucket in self.model.manifest.buckets if bucket_fits(bucket, head.inputs)]
        if not self.batches or head.alone:
            return min(fitting, key=elements), [head], 1
        # The smallest length that fits the first job; of its batch sizes, the one with the most rows per second.
        shape = row_shape(min(fitting, key=lambda bucket: (elements(bucket) // rows_of(bucket), rows_of(bucket))))
        buckets = [bucket for bucket in fitting if row_shape(bucket) == shape]
        buckets.sort(key=rows_of)
        widest, room = buckets[-1], rows_of(buckets[-1])
        group, rows = [], 0
        for job in ready:
            same = job.inputs.keys() == head.inputs.keys()  # no job here is ``alone``: those precede all others
            if same and rows + job.rows <= room and bucket_fits(widest, job.inputs):
                group.append(job)
                rows += job.rows
                if rows >= room:
                    break

        def taken(bucket: BucketSpec) -> list[Job]:
            jobs, left = [], rows_of(bucket)
            for job in group:
                if job.rows > left:
                    break
                jobs.append(job)
                left -= job.rows
            return jobs

        best = self.steps.costs.cheapest(buckets, lambda bucket: sum(job.rows for job in taken(bucket)))
        return best, taken(best), room

    def _run_group(self, bucket: BucketSpec) -> None:
        jobs = self._current
        if not jobs:
            return
        rows = sum(job.rows for job in jobs)
        total = rows_of(bucket) if self.batches and bucket.inputs else 1
        try:
            tensors = self._tensors(bucket, jobs)
            self.steps.begin(bucket.name, tensors)
            outputs = self.steps.finish(rows, total - rows)
        except FATAL:
            raise
        except Exception as error:  # only this step is lost
            self._blame(_failure(error))
            return
        self._current = []
        self._proven = functools.partial(self.steps.timed, bucket.name, tensors)
        values = [outputs[spec.name] for spec in bucket.outputs]
        start = 0
        for job in jobs:
            rows = [value.narrow(0, start, job.rows) for value in values] if self.batches else values
            start += job.rows
            results = zip(bucket.outputs, cut(bucket, job.inputs, rows), strict=True)
            # Copy, so that one caller's result neither keeps the rows of the others alive nor shares memory with them.
            self._succeed(job, {spec.name: value.clone() for spec, value in results})

    def _tensors(self, bucket: BucketSpec, jobs: list[Job]) -> Outputs:
        """Return the inputs of all ``jobs`` in the bucket's shapes."""
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
        """Run a model with user-defined routing, called exactly as its user would."""
        call = functools.partial(self._forward, job.inputs)
        try:
            result = call()
        except FATAL:
            raise
        except Exception as error:
            self._blame(_failure(error))
            return
        self.steps.worked, self._proven = True, call
        self._current = []
        if not isinstance(result, dict):
            names = [spec.name for spec in self.model.manifest.buckets[0].outputs]
            result = dict(zip(names, result if isinstance(result, (tuple, list)) else [result], strict=False))
        self._succeed(job, result)

    def _forward(self, inputs: Outputs) -> Any:
        with self.steps.visible(""):
            return cast("TensorParallelModel", self.model).forward(**inputs)

    # --- endings -------------------------------------------------------------------------------------------

    def _succeed(self, job: Job, outputs: Outputs) -> None:
        try:
            result = job.convert(outputs)
        except Exception as error:
            self._fail(job, GenerationError(f"the outputs could not be converted: {error}"))
            return
        self._end(job, "done", lambda: job.future.set_result(result))

    def _fail(self, job: Job, error: Exception) -> None:
        late = isinstance(error, DeadlineExceededError)
        outcome = "cancelled" if job.future.cancelled() else "deadline" if late else "error"
        self._end(job, outcome, lambda: job.future.set_exception(error))

    def _end(self, job: Job, outcome: str, tell: Callable[[], None] | None = None) -> None:
        """Count the end, and only then ``tell`` the caller, unless it has cancelled the call."""
        self.queue.ended(outcome, job.whole)
        if tell is not None and (job.future.running() or job.future.set_running_or_notify_cancel()):
            tell()
        if not job.begun:
            self.queue.withdrawn(job)
        self.gate.end(job.whole)
        self.queue.reported()

    def _fail_all(self, error: Exception) -> None:
        with self.lock:
            jobs = [*self._current, *self._pending, *self._arrivals]
            self._current, self._pending = [], FairQueue()
            self._arrivals.clear()
        for job in jobs:
            self._fail(job, error)

    def _ranks_lost(self, error: BaseException) -> None:
        """If a graph raised, one of the step's requests is at fault: only those are in doubt, others are kept."""
        if not isinstance(error, RankFailedError):
            super()._ranks_lost(error)
            return
        failure = GenerationError(f"the model failed on this request's inputs: {summary(error)}")
        failure.__cause__ = error
        self._blame(failure)

    def _blame(self, error: Exception) -> None:
        """Fail the job in the step with ``error``. Of several it is unknown which one is at fault: each is run alone,
        before all others."""
        suspects, self._current = self._current, []
        if len(suspects) == 1:
            self._fail(suspects[0], error)
            return
        for job in suspects:
            job.alone = True
            self._pending.add(job)

    def _padding_inputs(self, name: str) -> Outputs:
        return lawful_inputs(self.model.manifest.bucket(name))

    def _prove(self) -> None:
        proven, self._proven = self._proven, None  # if it fails now, the next start goes without it
        if proven is not None:
            proven()
            self.steps.worked, self._proven = True, proven

    def _warmed(self) -> None:
        if self.model.manifest.states:
            self.model.reset_states()


def _failure(error: Exception) -> NxdError:
    return error if isinstance(error, NxdError) else GenerationError(f"the step failed: {error}")


def batches_rows(manifest: Manifest) -> bool:
    """Whether the manifest declares rows independent: dimension 0 of every input is padded and of every output cut.

    A model with a bucket kernel or with its own states never batches.
    """
    if manifest.states or BUCKET_KERNEL_REQUIREMENT in manifest.requires or not manifest.buckets:
        return False
    for bucket in manifest.buckets:
        if not bucket.inputs or any(0 not in spec.pad for spec in bucket.inputs):
            return False
        if len({spec.shape[0] for spec in bucket.inputs}) != 1:
            return False
        names = {spec.name for spec in bucket.inputs}
        for spec in bucket.outputs:
            source = spec.cut.get(0)
            if source is None or source[0] not in names or source[1] != 0:
                return False
    return True


def bucket_fits(bucket: BucketSpec, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether ``bucket`` takes these inputs, after any declared padding."""
    names = {spec.name for spec in bucket.inputs}
    if not inputs.keys() <= names:
        return False
    return all(
        fits(spec, inputs[spec.name]) if spec.name in inputs else spec.default is not None for spec in bucket.inputs
    )


def rows_of(bucket: BucketSpec) -> int:
    """Return the batch size of a bucket whose rows are independent."""
    return bucket.inputs[0].shape[0]


def row_shape(bucket: BucketSpec) -> tuple:
    """Return the shape that buckets have in common if they differ only in batch size."""
    return tuple((spec.name, spec.dtype, tuple(spec.shape[1:])) for spec in bucket.inputs)
