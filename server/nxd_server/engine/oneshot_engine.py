"""The engine of one-shot models (encoders, classifiers, any traced model). Calls are checked and queued here, and
answered by the engine's thread (:class:`DynamicBatcher`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from nxd_infer.artifact.manifest import BUCKET_KERNEL_REQUIREMENT, Manifest
from nxd_infer.errors import ModelConfigError, NxdError
from nxd_infer.runtime.router import Router, elements
from nxd_server.engine.core.model import RoutingModel
from nxd_server.engine.core.step_costs import Graph, StepCosts
from nxd_server.engine.dynamic_batcher import DynamicBatcher, Job, Outputs
from nxd_server.engine.engine_controls import EngineControls
from nxd_server.engine.engine_parts import EngineParts
from nxd_server.engine.events import EngineStats
from nxd_server.engine.oneshot_batching import batches_rows, check_rows
from nxd_server.engine.queue_limit import check_timeout
from nxd_server.engine.weight_gate import WholeRequest


class OneShotEngine(EngineControls):
    """Serve one model whose calls are independent of one another."""

    def __init__(
        self,
        model: RoutingModel,
        *,
        max_delay_ms: float = 2.0,
        max_queued_requests: int = 128,
        restart_limit: int = 3,
        restart_window: float = 600.0,
        idle_probe: float | None = 5.0,
        on_state: Callable[[str], None] | None = None,
        costs: Mapping[str, float] | None = None,
    ):
        """``max_delay_ms``: how long a request may wait for others to share its step; ``costs``: seconds by bucket,
        used instead of measurements. Raises ModelConfigError for an artifact traced for generation."""
        manifest: Manifest = model.manifest
        if manifest.metadata.get("task") == "generate":
            raise ModelConfigError("the artifact was traced for generation: use Engine")
        if max_delay_ms < 0:
            raise ValueError(f"max_delay_ms must be at least 0, got {max_delay_ms}")
        self.batches = batches_rows(manifest)
        parts = EngineParts(
            model,
            StepCosts((Graph(bucket.name, 1, elements(bucket)) for bucket in manifest.buckets), costs),
            max_queued_requests=max_queued_requests,
            capacity=max((bucket.inputs[0].shape[0] for bucket in manifest.buckets), default=1) if self.batches else 1,
            restart_limit=restart_limit,
            restart_window=restart_window,
        )
        self._kernel = BUCKET_KERNEL_REQUIREMENT in manifest.requires
        self._router = Router(manifest.buckets)
        self._batcher = DynamicBatcher(model, parts, self.batches, max_delay_ms / 1000)
        if manifest.states:
            idle_probe = None  # a probe would change the model's states
        super().__init__("OneShotEngine", parts, self._batcher, idle_probe, on_state)

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
        tensors, queue = dict(inputs), self.parts.queue
        try:
            check_timeout(timeout)
            if not self._kernel:
                self._router.route((), tensors)
            if self.batches:
                check_rows(tensors)
        except (NxdError, ValueError):
            queue.rejected["invalid"] += 1
            raise
        now = time.monotonic()
        rows = next(iter(tensors.values())).shape[0] if self.batches and tensors else queue.capacity
        future: Future = Future()
        deadline = None if timeout is None else now + timeout
        job = Job(tensors, future, rows, now, deadline, convert or dict, whole or WholeRequest())
        with self.parts.lock:
            self.thread.check_open(continuing)
            if not (continuing and self.parts.gate.wanted):  # the queued requests wait for this one to end
                queue.check(1)
            queue.taken(1)
            self.parts.gate.take(job.whole, 1)
            self._batcher.put(job)
        if whole is None:
            job.whole.close()
        return future

    def stats(self) -> EngineStats:
        stats = super().stats()
        stats.running = self._batcher.running
        stats.waiting = max(0, stats.waiting - stats.running)
        return stats
