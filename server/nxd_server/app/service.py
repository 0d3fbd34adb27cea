"""The service: an artifact's ranks, its engine, its tokenizer, and their current state.

The service starts in its own thread, so that the HTTP layer answers ``/livez`` from the first moment; it is ready
once its ranks have completed a step. The graphs run in the rank processes, never in this one. A watchdog thread
follows the engine. The engine restarts lost ranks itself; if that takes longer than ``recovery`` allows, the service
reports that the process should exit, so that a supervisor can replace it.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nxd_infer.errors import ArtifactError, NxdError, RankFailedError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.rank_model import RankModel, takes_arrays
from nxd_infer.runtime.time_bounds import MARGIN, Bounds
from nxd_server import engine  # its names are imported on first use, once the ranks' processes run
from nxd_server.app.served_model import ServedModel
from nxd_server.errors import EngineUnavailableError, RequestError, log_failure, summary
from nxd_server.settings import ServerSettings

if TYPE_CHECKING:
    from nxd_infer.artifact.manifest import InputSpec, Manifest
    from nxd_infer.artifact.reader import LoadedArtifact
    from nxd_infer.runtime.model import TensorParallelModel
    from nxd_infer.runtime.ranks import RankHealth
    from nxd_server.engine import Engine, EngineHealth, EngineStats, OneShotEngine, SamplingParams, TextEncoder
    from nxd_server.engine.adapter_slots import Adapter, Adapters
    from nxd_server.text.grammars import CompiledGrammar

logger = logging.getLogger("nxd_server.service")

SPAWN_SECONDS = 1.0
WATCH_SECONDS = 0.2
IDLE_PROBE_SECONDS = 2.0
RECOVERY_STARTS = 2
"""Starts of maximum length that a recovery allows: ranks that hang during the first are noticed at its end, and are
started once more."""


class RecoveryTimeout:
    """How long lost ranks may take to be ready again, and the progress of that.

    ``setting`` is ``recovery_timeout``; None derives the limit from the time of the start on this machine, once
    :meth:`started` has been called.
    """

    def __init__(self, setting: float | None):
        self.expected: float | None = None
        """Seconds that the last start or recovery took."""
        self._setting = setting
        self._bounds: Bounds | None = None
        self._after_load = 0.0

    def started(self, seconds: float, bounds: Bounds) -> None:
        """The first start took ``seconds``; ``bounds`` knows what the ranks take to load."""
        self._bounds = bounds
        self.took(seconds)

    def took(self, seconds: float) -> None:
        """The ranks became ready again in ``seconds``."""
        self.expected = seconds
        load = self._bounds and self._bounds.load_seconds
        self._after_load = max(self._after_load, seconds - (load or 0.0))

    @property
    def limit(self) -> float:
        """Seconds after which the server gives up on ranks that are not ready again. Derived: two starts, each within
        the limit of a load, and what else they do until they are ready, which are swaps and the first steps."""
        if self._setting is not None:
            return self._setting
        if self._bounds is None:
            return math.inf
        return RECOVERY_STARTS * (self._bounds.load + MARGIN * self._after_load)

    def progress(self, seconds: float, stage: str) -> str:
        """Describe the progress of a recovery that began ``seconds`` ago."""
        about = "" if self.expected is None else f" of about {self.expected:.0f} s"
        return f"starting the ranks again: {stage}, {seconds:.0f} s{about} (at most {self.limit:.0f} s)"

    def late(self, stage: str) -> str:
        """Return the message for a recovery that took too long."""
        about = "" if self.expected is None else f" (the last start took {self.expected:.1f} s; now {stage})"
        return (
            f"the ranks were not ready again within {self.limit:g} s{about}: see what else runs on this machine, or "
            "set recovery_timeout higher"
        )


class Service(ServedModel):
    """One artifact and everything that serves it.

    Args:
        artifact: the artifact's directory.
        settings: the server's settings.
        on_failure: called once, from another thread, with the reason, when the process should end.
    """

    def __init__(
        self,
        artifact: str | Path,
        settings: ServerSettings,
        on_failure: Callable[[str], None] | None = None,
    ):
        super().__init__(Path(artifact), settings)
        self.created = int(time.time())
        self.load_seconds: float | None = None
        self.failure: str | None = None
        """Why the service can never be ready again."""
        self.recovery = RecoveryTimeout(settings.recovery_timeout)
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._closing = False
        self._draining = False
        self._spawned = threading.Event()
        self._stage = "loading the artifact"
        self._model: RankModel | None = None
        self._engine: Engine | None = None
        self._oneshot: OneShotEngine | None = None
        self._encoder: TextEncoder | None = None
        self._thread = threading.Thread(target=self._run, name="nxd-service", daemon=True)

    # --- lifecycle -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load; return shortly after, once the rank processes run or failed to start.

        Imports by the caller before that would delay them by as long, because Python runs one thread at a time.
        """
        self._thread.start()
        self._spawned.wait(SPAWN_SECONDS)

    def _run(self) -> None:
        try:
            try:
                self._load()
            finally:
                self._spawned.set()
        except BaseException as error:  # nothing ends this thread without a word
            if self._closing:
                return
            foreseen = isinstance(error, RankFailedError) and error.foreseen
            if not foreseen and not (isinstance(error, NxdError) and summary(error) == str(error)):
                log_failure(logger, "the artifact cannot be served", error)  # the ranks' output is for the log only
            self._fail(f"the artifact cannot be served: {summary(error) or type(error).__name__}")
            return
        self._watch()

    def _load(self) -> None:
        begin = time.monotonic()
        model = self._open()
        if self._closing:
            return
        worker = self._start_engine(model)
        gc.freeze()  # with torch loaded, a full collection stopped every thread for 0.2 s
        self.load_seconds = time.monotonic() - begin
        self.recovery.started(self.load_seconds, model.bounds)
        worker.restarts.bounded = True  # by this service
        if not self._closing:
            logger.info("ready after %.1f s: %s", self.load_seconds, self.model_name)

    def _open(self) -> RankModel:
        """Read the artifact and start its ranks; return the model for the engine."""
        settings = self.settings
        logger.info("loading %s", self.artifact)
        artifact = load_artifact(str(self.artifact), expect_digest=settings.expect_digest, later=True)
        artifact.check_kernel(settings.allow_kernel)
        self._manifest = artifact.manifest
        self._check_task()
        degree = artifact.manifest.world_size
        self._stage = f"starting {degree} rank{'s' if degree > 1 else ''}"
        logger.info(self._stage)
        model = self._make_model(artifact)
        model.bounds.patient = True  # this service watches the first step, which may be slow
        with self._lock:
            self._model = model
            if self._closing:
                return model

        text: Future[None] = Future()

        def read() -> None:
            try:
                self._read_text(self.task, artifact)
                if settings.admin():  # its holder may change weights, and sharding them needs torch: import it now
                    import nxd_infer.runtime.updates.adapters  # noqa: F401  # slow: torch
                text.set_result(None)
            except BaseException as error:
                text.set_exception(error)

        # In a daemon thread, which the process does not wait for when it exits; the ranks take seconds to start.
        threading.Thread(target=read, name="nxd-text", daemon=True).start()
        model.start()
        wait([text], model.bounds.start)
        if not text.done():
            raise ArtifactError(
                f"reading the tokenizer has taken more than {model.bounds.start:.0f} s: raise start_timeout if the "
                "disk is slow"
            )
        text.result()
        return model

    def _make_model(self, artifact: LoadedArtifact) -> RankModel:
        """Return the model of ``artifact``, whose files are not hashed yet.

        The engine for generation makes no tensors, so its server does not import torch, and hashes while the ranks do.
        """
        options: dict[str, Any] = {
            name: getattr(self.settings, name) for name in ("call_timeout", "start_timeout", "threads_per_rank")
        }

        def before_load() -> None:
            self._spawned.set()
            artifact.verify()

        if self.task == "generate" and takes_arrays(artifact.manifest):
            return RankModel(artifact, before_load=before_load, **options)
        before_load()
        from nxd_infer.runtime.model import TensorParallelModel  # slow: torch

        return TensorParallelModel(artifact, in_process=False, **options)

    def _start_engine(self, model: RankModel) -> Engine | OneShotEngine:
        settings = self.settings
        options: dict[str, Any] = {
            "max_queued_requests": settings.max_queued_requests,
            "restart_limit": settings.max_restarts,
            "idle_probe": IDLE_PROBE_SECONDS,
        }
        if self.task == "generate":
            options |= {name: getattr(settings, name) for name in ("stall_ratio", "speculate", "prefix_caching")}
            worker = self._engine = engine.Engine(model, self._tokenizer, **options)
            worker.adapters.taken_name = self.model_name
            for name, _, path in (word.partition("=") for word in settings.lora):
                worker.adapters.load(name, path)
        else:
            worker = self._oneshot = engine.OneShotEngine(cast("TensorParallelModel", model), **options)
            if self._tokenizer is not None:
                self._encoder = engine.TextEncoder(self._oneshot, self._tokenizer)
        worker.start(on_progress=self._progress)
        return worker

    def _progress(self, done: int, total: int, bucket: str) -> None:
        rest = f", next {bucket}" if bucket else "; the others run when they are needed" if done < total else ""
        self._stage = f"warmed up {done} of {total} graphs{rest}"
        logger.info(self._stage)

    def _watch(self) -> None:
        """Wait for the engine to recover, but no longer than the limit."""
        worker = self._worker
        while worker is not None and not self._closing:
            if worker.wait_failed(WATCH_SECONDS):
                self._fail(worker.verdict)
                return
            restarts, stage = worker.restarts, worker.restarts.stage
            if restarts.took is not None:
                self.recovery.took(restarts.took)  # repeating the same value has no effect
            if (restarts.seconds or 0.0) > self.recovery.limit:
                self._fail(self.recovery.late(stage))
                return

    def _fail(self, reason: str) -> None:
        self.failure = reason
        logger.critical("giving up: %s", reason)
        if self._on_failure is not None and not self._closing:
            self._on_failure(reason)

    def begin_drain(self) -> None:
        """Reject new requests from now on."""
        self._draining = True

    def drain(self, timeout: float) -> bool:
        """Reject new requests and wait for the others; False if ``timeout`` seconds were not enough."""
        self._draining = True
        worker = self._worker
        return True if worker is None else worker.drain(timeout)

    def close(self) -> None:
        """End everything; running requests fail. The ranks have exited when this returns."""
        with self._lock:
            self._closing = True
        if self.chat_template is not None:
            self.chat_template.stop()
        worker, model = self._worker, self._model
        starting = worker is None or worker.state in ("starting", "recovering", "failed")
        if worker is not None:
            worker.close(0.0 if starting else 5.0)
        if model is not None:
            model.close()  # only this ends a start that the engine's thread may be waiting for
        if worker is not None:
            worker.close(5.0)

    # --- description -----------------------------------------------------------------------------------

    @property
    def _worker(self) -> Engine | OneShotEngine | None:
        return self._engine or self._oneshot

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest; raises EngineUnavailableError until it has been read."""
        if self._manifest is None:
            raise self._unavailable()
        return self._manifest

    def require_encoder(self) -> TextEncoder:
        """Return the encoder of texts to vectors. Raises RequestError if the artifact has no tokenizer."""
        self.require_tokenizer()
        if self._encoder is None:  # created here, because it needs the engine
            raise self._unavailable()
        return self._encoder

    def input_specs(self) -> dict[str, InputSpec]:
        """Return the inputs by name, as declared by the first bucket that has them."""
        specs: dict[str, InputSpec] = {}
        for bucket in self.manifest.buckets:
            for spec in bucket.inputs:
                specs.setdefault(spec.name, spec)
        return specs

    # --- state ------------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, str, str]:
        """Return whether a request sent now would be served, the state, and the reason if not."""
        if self.failure is not None:
            return False, "failed", self.failure
        if self._draining:
            return False, "draining", "the server is shutting down"
        health = self.health()
        if health is None or health.state == "starting":
            return False, "starting", self._stage
        if health.recovering_for is not None:
            return False, health.state, self.recovery.progress(health.recovering_for, health.stage)
        if not health.ready:
            return False, health.state if health.state != "ready" else "stalled", health.reason
        for rank in health.ranks:
            if rank.state != "running" or not rank.alive:
                return False, "stalled", f"not every rank is running: rank {rank.rank} {rank.state}"
        return True, "ready", ""

    @property
    def ready(self) -> bool:
        return self.readiness()[0]

    @property
    def weight_version(self) -> int:
        """How often the weights were swapped since the artifact was loaded."""
        worker = self._worker
        return worker.gate.version if worker is not None else 0

    @property
    def restarts(self) -> int:
        return stats.restarts if (stats := self.stats()) is not None else 0

    def stats(self) -> EngineStats | None:
        """Return the engine's counters, or None if there is no engine yet."""
        return worker.stats() if (worker := self._worker) is not None else None

    def health(self) -> EngineHealth | None:
        worker = self._worker
        return worker.health() if worker is not None else None

    def ranks(self) -> list[RankHealth]:
        """Return every rank's health, even before the engine exists."""
        if (health := self.health()) is not None:
            return health.ranks
        model = self._model
        return model.health() if model is not None else []

    def _unavailable(self) -> EngineUnavailableError:
        ready, state, reason = self.readiness()
        if ready:  # since the caller looked
            state, reason = "recovering", "its ranks are ready again"
        retry = None if state in ("failed", "draining") else 5.0
        return EngineUnavailableError(f"the server takes no requests now: {reason or state}", state, retry)

    def require_loaded(self) -> None:
        """Raise EngineUnavailableError until the artifact has been read."""
        if self._manifest is None:
            raise self._unavailable()

    def require_ready(self) -> None:
        """Raise EngineUnavailableError unless a request may be queued. (The engine itself ends a stalled step.)"""
        worker = self._worker
        if self.failure is not None or self._draining or worker is None or worker.state != "ready":
            raise self._unavailable()

    def adapters(self) -> list[Adapter]:
        """Return the adapters that requests may name."""
        return self._engine.adapters.listed() if self._engine is not None else []

    def require_adapters(self) -> Adapters:
        """Return the adapters for changes. Raises RequestError if the artifact cannot have any."""
        self.require_ready()
        if self._engine is None:
            raise RequestError("", f"{self.model_name!r} was not traced for generation and takes no adapters")
        return self._engine.adapters

    @property
    def room(self) -> int:
        """How many choices run and wait at most."""
        return (0 if self._worker is None else self._worker.queue.capacity) + self.settings.max_queued_requests

    # --- requests -----------------------------------------------------------------------------------------

    def require_engine(self) -> Engine:
        """Return the engine that generates. Raises RequestError for an artifact of another kind."""
        self.require_ready()
        if self._engine is None:
            raise RequestError("", f"{self.model_name!r} was not traced for generation")
        return self._engine

    def require_oneshot(self) -> OneShotEngine:
        """Return the engine of one-shot calls. Raises RequestError for an artifact of another kind."""
        self.require_ready()
        if self._oneshot is None:
            raise RequestError("", f"{self.model_name!r} was traced for generation: use {self.main_route}")
        return self._oneshot

    def grammar_of(self, params: SamplingParams) -> CompiledGrammar | None:
        """Return the compiled grammar; raises the errors of :meth:`Engine.grammar_of`."""
        return None if self._engine is None else self._engine.grammar_of(params)

    def update_weights(self, path: str | os.PathLike[str], tag: str | None, timeout: float) -> int:
        """Swap the weights between requests; return the version. Raises as :meth:`EngineCore.update_weights`."""
        self.require_ready()
        if (worker := self._worker) is None:
            raise self._unavailable()
        return worker.update_weights(path, tag=tag, timeout=timeout)
