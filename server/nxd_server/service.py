"""What is served: an artifact's ranks, its engine, its tokenizer, and how they are right now.

The service starts in a thread of its own, so that the HTTP half answers ``/livez`` from the first moment; it is ready
once every graph has run. The graphs run in the ranks' processes, never in this one. A watchdog thread follows the
engine: it restarts the ranks by itself, and where it cannot within ``recovery_timeout`` the service reports that the
process should end, because a supervisor above can do what it could not.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import ModelConfigError, NxdError, RankError
from nxd_server.bounded import BoundedModel, make_model
from nxd_server.config import ServerSettings
from nxd_server.errors import EngineUnavailableError, GenerateOnlyError, RequestError, summary
from nxd_server.served import ROUTES, Served

if TYPE_CHECKING:
    import torch

    from nxd_infer.trace.manifest import InputSpec, Manifest
    from nxd_infer.trace.rank_model import RankModel
    from nxd_server.engine import Engine, EngineHealth, EngineStats, OneShotEngine, SamplingParams, TextEncoder, Ticket
    from nxd_server.engine.adapters import Adapter, Adapters
    from nxd_server.engine.events import OnEvent
    from nxd_server.engine.weights import WholeRequest
    from nxd_server.text.chat import TemplateSources
    from nxd_server.text.lanes import BoundedTemplate, BoundedTokenizer
    from nxd_server.text.tokenizer import Tokenizer

logger = logging.getLogger("nxd_server.service")

SPAWN_SECONDS = 1.0
WATCH_SECONDS = 0.2
IDLE_PROBE_SECONDS = 2.0


class Service(Served):
    """One artifact, being served.

    Args:
        artifact: its directory.
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
        self._tokenizer: Tokenizer | None = None
        self.chat_template: BoundedTemplate | None = None
        self._bounded_tokenizer: BoundedTokenizer | None = None
        self._thread = threading.Thread(target=self._run, name="nxd-service", daemon=True)

    # --- life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load; returns once the ranks' processes run or could not be started, at the latest after a moment.

        What the caller imports next would hold them up by as long, as Python runs one thread at a time.
        """
        self._thread.start()
        self._spawned.wait(SPAWN_SECONDS)

    def _run(self) -> None:
        try:
            try:
                self._load()
            finally:
                self._spawned.set()
        except Exception as error:
            if self._closing:
                return
            if not isinstance(error, NxdError):
                logger.exception("the artifact cannot be served")
            elif isinstance(error, RankError):  # what the rank printed is for the log alone
                logger.error("the artifact cannot be served: %s", error)
            self._fail(f"the artifact cannot be served: {summary(error) or type(error).__name__}")
            return
        self._watch()

    def _load(self) -> None:
        begin = time.monotonic()
        model = self._open()
        if self._closing:
            return
        self._start_engine(model)
        self.load_seconds = time.monotonic() - begin
        if not self._closing:
            logger.info("ready after %.1f s: %s", self.load_seconds, self.model_name)

    def _open(self) -> Any:
        """Read the artifact and start its ranks; the model as the engine shall see it."""
        from nxd_infer.trace.artifact import load_artifact

        settings = self.settings
        logger.info("loading %s", self.artifact)
        artifact = load_artifact(str(self.artifact), expect_digest=settings.expect_digest, later=True)
        self._manifest = artifact.manifest
        self._check_task()
        degree = artifact.manifest.tp_degree
        self._stage = f"starting {degree} rank{'s' if degree > 1 else ''}"
        logger.info(self._stage)
        # The bound that counts is BoundedModel's; the ranks' own must not be below a cold first run. Only a model that
        # routes by its user's kernel is not called through it.
        kernel = "bucket-kernel" in artifact.manifest.requires
        model = make_model(
            artifact,
            self._spawned,
            call_timeout=settings.call_timeout if kernel else settings.start_timeout,
            start_timeout=settings.start_timeout,
            threads_per_rank=settings.threads_per_rank,
        )
        with self._lock:
            self._model = model
            if self._closing:
                return model
        text: Future[None] = Future()

        def read() -> None:
            try:
                self._read_text(self.task)
                if settings.admin():  # who has that key may change weights, and cutting them takes torch: now, once
                    import nxd_infer.trace.adapters  # noqa: F401
                text.set_result(None)
            except Exception as error:
                text.set_exception(error)

        # While the ranks start, which takes seconds; in a thread that the process does not wait for at its end.
        threading.Thread(target=read, name="nxd-text", daemon=True).start()
        model.start()
        text.result()
        return BoundedModel(model, settings.call_timeout, settings.start_timeout)

    def _check_task(self) -> None:
        """Refuse what the artifact was not traced for, before its ranks take seconds to start."""
        settings = self.settings
        if self.task != "generate":
            for name in ("lora", "speculate"):
                if getattr(settings, name):
                    raise GenerateOnlyError(name, self.task)
        elif settings.speculate:
            from nxd_server.engine.speculation import check_speculate

            check_speculate(self.metadata, settings.speculate)

    def _read_text(self, task: str) -> None:
        """The tokenizer and the chat template that lie beside the graphs."""
        if task not in ROUTES:
            return
        from nxd_server.text.chat import TemplateSources
        from nxd_server.text.tokenizer import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_dir(self.artifact)
        except ModelConfigError as error:
            logger.warning("no text routes, token ids only: %s", error)
        if task == "generate" and self._tokenizer is not None:
            self._use_template(TemplateSources.from_dir(self.artifact))

    def _use_template(self, sources: TemplateSources | None) -> None:
        """Serve conversations by the template, once it is known to be one."""
        if sources is None:
            return
        from nxd_server.text.lanes import BoundedTemplate

        settings = self.settings
        template = BoundedTemplate(sources, settings.render_timeout, settings.max_queued_requests)
        self.chat_template = template  # first: closing ends it while it is checked
        template.check()

    def _start_engine(self, model: Any) -> None:
        settings = self.settings
        options: dict[str, Any] = {
            "max_queued_requests": settings.max_queued_requests,
            "restart_limit": settings.max_restarts,
            "idle_probe": IDLE_PROBE_SECONDS,
        }
        if self.task == "generate":
            from nxd_server.engine import Engine

            options |= {"stall_ratio": settings.stall_ratio, "speculate": settings.speculate}
            engine = self._engine = Engine(model, self._tokenizer, **options)
            engine.adapters.taken_name = self.model_name
            for name, _, path in (word.partition("=") for word in settings.lora):
                engine.adapters.load(name, path)
        else:
            from nxd_server.engine import OneShotEngine, TextEncoder

            engine = self._oneshot = OneShotEngine(model, **options)
            if self._tokenizer is not None:
                self._encoder = TextEncoder(self._oneshot, self._tokenizer)
        engine.start(on_progress=self._progress)

    def _progress(self, done: int, total: int, bucket: str) -> None:
        self._stage = f"warming up: graph {min(done + 1, total)} of {total} ({bucket})"
        logger.info("warmed up %d of %d graphs%s", done, total, "" if done == total else f", next {bucket}")

    def _watch(self) -> None:
        """Give the engine its time to recover, and no more."""
        recovering: float | None = None
        while not self._closing:
            worker = self._worker
            if worker is None:
                return
            if worker.wait_failed(WATCH_SECONDS):
                error = worker.health().error
                self._fail(f"the ranks failed and could not be started again: {error}")
                return
            if worker.state != "recovering":
                recovering = None
                continue
            recovering = recovering or time.monotonic()
            if time.monotonic() - recovering > self.settings.recovery_timeout:
                self._fail(f"the ranks were not ready again within {self.settings.recovery_timeout:g} s")
                return

    def _fail(self, reason: str) -> None:
        self.failure = reason
        logger.critical("giving up: %s", reason)
        if self._on_failure is not None and not self._closing:
            self._on_failure(reason)

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the others; False when ``timeout`` seconds were not enough."""
        self._draining = True
        worker = self._worker
        return True if worker is None else worker.drain(timeout)

    def close(self) -> None:
        """End everything; what still runs fails. The ranks are gone when this returns."""
        with self._lock:
            self._closing = True
        for bounded in (self.chat_template, self._bounded_tokenizer):
            if bounded is not None:
                bounded.stop()
        worker, model = self._worker, self._model
        if model is not None and (worker is None or worker.state in ("starting", "recovering", "failed")):
            model.close()  # first: the engine's thread may be inside a start that only this ends
        if worker is not None:
            worker.close(5.0)
        if model is not None:
            model.close()

    # --- what it is -----------------------------------------------------------------------------------

    @property
    def _worker(self) -> Engine | OneShotEngine | None:
        return self._engine or self._oneshot

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest; raises EngineUnavailableError before it is read."""
        if self._manifest is None:
            raise self._unavailable()
        return self._manifest

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer; RequestError when the artifact has none."""
        if self._tokenizer is None:
            instead = "" if self.task == "generate" else "; use /v1/predict with token ids"
            raise RequestError("", f"{self.model_name!r} has no tokenizer, which this route needs{instead}")
        return self._tokenizer

    def bounded_tokenizer(self) -> BoundedTokenizer:
        """The tokenizer for texts of any size; RequestError when the artifact has none. For the loop's thread alone."""
        tokenizer = self.require_tokenizer()
        if self._bounded_tokenizer is None:
            from nxd_server.text.lanes import BoundedTokenizer

            settings = self.settings
            self._bounded_tokenizer = BoundedTokenizer(
                tokenizer, settings.request_timeout, settings.max_queued_requests
            )
        return self._bounded_tokenizer

    def texts_aside(self) -> dict[str, int]:
        """How many conversations and texts are worked on in processes of their own, or wait for that."""
        template, tokenizer = self.chat_template, self._bounded_tokenizer
        return {
            "conversations": 0 if template is None else template.inside,
            "texts": 0 if tokenizer is None else tokenizer.inside,
        }

    def require_encoder(self) -> TextEncoder:
        """Texts to vectors; RequestError when the artifact has no tokenizer."""
        self.require_tokenizer()
        if self._encoder is None:  # not yet: it needs the engine
            raise self._unavailable()
        return self._encoder

    def input_specs(self) -> dict[str, InputSpec]:
        """Inputs by name, as the first bucket that has them declares them."""
        specs: dict[str, InputSpec] = {}
        for bucket in self.manifest.buckets:
            for spec in bucket.inputs:
                specs.setdefault(spec.name, spec)
        return specs

    # --- how it is ------------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, str, str]:
        """Whether a request sent now would be served; the state in a word; the reason when not."""
        if self.failure is not None:
            return False, "failed", self.failure
        if self._draining:
            return False, "draining", "the server is shutting down"
        health = self.health()
        if health is None or health.state == "starting":
            return False, "starting", self._stage
        if not health.ready:
            return False, health.state if health.state != "ready" else "stalled", health.reason
        for rank in health.ranks:
            if rank.get("state", "running") != "running" or not rank.get("alive", True):
                state = rank.get("state", "ended")
                return False, "stalled", f"rank {rank.get('rank')} is {state}"
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
        stats = self.stats()
        return stats.restarts if stats is not None else 0

    def stats(self) -> EngineStats | None:
        """The engine's counters, or None before it exists."""
        worker = self._worker
        return worker.stats() if worker is not None else None

    def health(self) -> EngineHealth | None:
        worker = self._worker
        return worker.health() if worker is not None else None

    def ranks(self) -> list[dict[str, Any]]:
        """Every rank's health, also while the engine is still being built."""
        if (health := self.health()) is not None:
            return health.ranks
        model = self._model
        return [dataclasses.asdict(rank) for rank in model.health()] if model is not None else []

    def _unavailable(self) -> EngineUnavailableError:
        _, state, reason = self.readiness()
        retry = None if state in ("failed", "draining") else 5.0
        return EngineUnavailableError(f"the server takes no requests now: {reason or state}", state, retry)

    def require_loaded(self) -> None:
        """EngineUnavailableError until the artifact has been read."""
        if self._manifest is None:
            raise self._unavailable()

    def require_ready(self) -> None:
        """EngineUnavailableError unless a request may be queued. (A stalled step is the engine's to end.)"""
        worker = self._worker
        if self.failure is not None or self._draining or worker is None or worker.state != "ready":
            raise self._unavailable()

    def adapters(self) -> list[Adapter]:
        """The adapters that requests may name."""
        return self._engine.adapters.listed() if self._engine is not None else []

    def require_adapters(self) -> Adapters:
        """The adapters, to be changed; RequestError when the artifact cannot have any."""
        self.require_ready()
        if self._engine is None:
            raise RequestError("", f"{self.model_name!r} was not traced for generation and takes no adapters")
        return self._engine.adapters

    # --- work -----------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_event: OnEvent,
        *,
        timeout: float,
        request_id: str,
        adapter: str | None = None,
        whole: WholeRequest | None = None,
    ) -> Ticket:
        """Queue a prompt; the errors of :meth:`Engine.submit`."""
        self.require_ready()
        if self._engine is None:
            raise RequestError("", f"{self.model_name!r} was not traced for generation")
        return self._engine.submit(
            list(prompt), params, on_event, timeout=timeout, request_id=request_id, adapter=adapter, whole=whole
        )

    def submit_tensors(
        self, inputs: Mapping[str, torch.Tensor], *, timeout: float, whole: WholeRequest | None = None
    ) -> Future[dict[str, torch.Tensor]]:
        """Queue a one-shot call; the errors of :meth:`OneShotEngine.submit`."""
        self.require_ready()
        if self._oneshot is None:
            raise RequestError("", f"{self.model_name!r} was traced for generation: use {self.main_route}")
        return self._oneshot.submit(dict(inputs), timeout=timeout, whole=whole)

    def update_weights(self, path: Path, tag: str | None, timeout: float) -> int:
        """Swap the weights between requests; the new version. The errors of :meth:`ModelWorker.update_weights`."""
        self.require_ready()
        worker = self._worker
        if worker is None:
            raise self._unavailable()
        return worker.update_weights(path, tag=tag, timeout=timeout)
