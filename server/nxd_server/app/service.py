"""The service: an artifact's ranks, its engine, its tokenizer and chat template, and their current state.

The service starts in its own thread, so that the HTTP layer answers ``/livez`` from the first moment; it is ready
once its ranks have completed a step. The graphs run in the rank processes, never in this one. A watchdog thread
follows the engine. The engine restarts lost ranks itself; if that takes longer than ``recovery`` allows, the service
reports that the process should exit, so that a supervisor can replace it.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nxd_infer.errors import ArtifactError, NxdError, RankFailedError
from nxd_infer.hugging_face.tokenizer import TOKENIZER
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.rank_model import RankModel, takes_arrays
from nxd_server import engine  # its names are imported on first use, once the ranks' processes run
from nxd_server.engine.rank_restarts import RecoveryTimeout
from nxd_server.engine.request import eos_token_ids
from nxd_server.engine.speculation import check_speculate
from nxd_server.errors import (
    EngineUnavailableError,
    GenerateOnlyError,
    RequestError,
    SettingsError,
    log_failure,
    summary,
)
from nxd_server.settings import ServerSettings
from nxd_server.text import reasoning
from nxd_server.text.chat_template import TemplateSources
from nxd_server.text.reasoning import Tags, tags_of
from nxd_server.text.template_process import BoundedTemplate
from nxd_server.text.tokenizer import Tokenizer
from nxd_server.text.tokenizer_files import TextFiles
from nxd_server.text.tool_calls import TAGS, format_of, takes_tools

if TYPE_CHECKING:
    from nxd_infer.artifact.manifest import InputSpec, Manifest
    from nxd_infer.artifact.reader import LoadedArtifact
    from nxd_infer.runtime.model import TensorParallelModel
    from nxd_infer.runtime.ranks import RankHealth
    from nxd_server.engine import Engine, EngineHealth, EngineStats, OneShotEngine, TextEncoder
    from nxd_server.engine.adapter_slots import Adapter

logger = logging.getLogger("nxd_server.service")

SPAWN_SECONDS = 1.0
WATCH_SECONDS = 0.2
IDLE_PROBE_SECONDS = 2.0
ROUTES = {"generate": "/v1/completions or /v1/chat/completions", "embed": "/v1/embeddings", "classify": "/v1/classify"}
ROUTES["token-classification"] = ROUTES["classify"]


class Service:
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
        self.artifact = Path(artifact)
        self.settings = settings
        self.chat_template: BoundedTemplate | None = None
        self.tool_format: str | None = None
        """Of the model's tool calls; see :mod:`nxd_server.text.tool_calls`. None: its template takes no tools."""
        self.reasoning_tags: Tags | None = None
        """Between which the model reasons; see :mod:`nxd_server.text.reasoning`. None: it does not."""
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
        self._manifest: Manifest | None = None
        self._tokenizer: Tokenizer | None = None
        self._engine: Engine | OneShotEngine | None = None
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
                self._read_text(artifact)
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

    def _check_task(self) -> None:
        """Reject settings that the artifact does not support, before its ranks take seconds to start."""
        settings = self.settings
        if self.task != "generate":
            for name in ("lora", "speculate", "chat_template"):
                if getattr(settings, name):
                    raise GenerateOnlyError(name, self.task)
            return
        if settings.lora and self._manifest is not None and not self._manifest.layout.get("adapters"):
            raise SettingsError(
                f"lora = {','.join(settings.lora)!r}: this artifact has no slots for adapters; trace the model again "
                "with --lora-slots"
            )
        if settings.speculate:
            check_speculate(self.metadata, settings.speculate)

    def _read_text(self, artifact: LoadedArtifact) -> None:
        """Read the tokenizer and the chat template that the manifest lists."""
        if unused := self.metadata.get("generation_without_effect"):
            logger.warning("generation_config.json has what requests do not get here: %s", ", ".join(unused))
        if self.task not in ROUTES:
            return
        if TextFiles(artifact).find(TOKENIZER) is None:
            if self.settings.chat_template is not None:
                raise SettingsError(f"chat_template: {self.artifact} has no tokenizer; trace the model with one")
            logger.warning("no %s, so this model can only be used through LLM", TOKENIZER)
            return
        self._tokenizer = Tokenizer.from_dir(artifact)
        if self.task == "generate":
            self._use_template(TemplateSources.from_dir(artifact, self.settings.chat_template))
            if self.chat_template is None:
                logger.info(
                    "no chat template, so /v1/chat/completions is refused: use /v1/completions, or give one with "
                    "--chat-template"
                )
        self._tokenizer.most_characters(self.max_len)  # scans the vocabulary now, not during a request

    def _use_template(self, sources: TemplateSources | None) -> None:
        """Serve conversations with this template, once it has been checked."""
        if sources is None:
            return
        settings = self.settings
        templates = [sources.default, *sources.named.values()]
        asked = settings.tool_call_parser
        self.tool_format = {"auto": format_of(templates), "none": None}.get(asked, asked)
        if asked == self.tool_format and not takes_tools(templates):
            raise SettingsError(
                f"tool_call_parser = {asked!r}: the model's chat template takes no tools, so the model would never see "
                "one; give a template that does with --chat-template, or leave tool_call_parser out"
            )
        asked = settings.reasoning_parser
        self.reasoning_tags = tags_of(templates) if asked == "auto" else reasoning.FORMATS.get(asked)
        if self._tokenizer is not None:
            tags = [*TAGS.get(self.tool_format or "", ()), *(self.reasoning_tags or ())]
            self._tokenizer = self._tokenizer.showing(tags)
        template = BoundedTemplate(sources, settings.render_timeout, settings.max_queued_requests)
        self.chat_template = template  # first, so that closing can end it during the check
        template.check()

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
            "max_queued_tokens": settings.max_queued_tokens,
            "max_queue_wait": settings.max_queue_wait,
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
            worker = self._engine = engine.OneShotEngine(cast("TensorParallelModel", model), **options)
            if self._tokenizer is not None and self.task in ROUTES:
                self._encoder = engine.TextEncoder(worker, self._tokenizer)
        worker.start(on_progress=self._progress)
        return worker

    def _progress(self, done: int, total: int, bucket: str) -> None:
        rest = f", next {bucket}" if bucket else "; the others run when they are needed" if done < total else ""
        self._stage = f"warmed up {done} of {total} graphs{rest}"
        logger.info(self._stage)

    def _watch(self) -> None:
        """Wait for the engine to recover, but no longer than the limit."""
        worker = self._engine
        while worker is not None and not self._closing:
            if worker.wait_failed(WATCH_SECONDS):
                self._fail(worker.verdict)
                return
            restarts, stage = worker.restarts, worker.restarts.stage
            if restarts.took is not None:
                self.recovery.took(restarts.took)  # repeating the same value has no effect
            if stage and (restarts.seconds or 0.0) > self.recovery.limit:
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
        return self._engine is None or self._engine.drain(timeout)

    def close(self) -> None:
        """End everything; running requests fail. The ranks have exited when this returns."""
        with self._lock:
            self._closing = True
        if self.chat_template is not None:
            self.chat_template.stop()
        worker, model = self._engine, self._model
        starting = worker is None or worker.state in ("starting", "recovering", "failed")
        if worker is not None:
            worker.close(0.0 if starting else 5.0)
        if model is not None:
            model.close()  # only this ends a start that the engine's thread may be waiting for
        if worker is not None:
            worker.close(5.0)

    # --- description -----------------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest; raises EngineUnavailableError until it has been read."""
        if self._manifest is None:
            raise self._unavailable()
        return self._manifest

    @property
    def metadata(self) -> dict[str, Any]:
        return self._manifest.metadata if self._manifest is not None else {}

    @property
    def task(self) -> str:
        """``generate``, ``embed``, ``classify``, or empty for any other traced model."""
        return str(self.metadata.get("task") or "")

    @property
    def main_route(self) -> str:
        return ROUTES.get(self.task, "/v1/predict")

    @property
    def model_name(self) -> str:
        """The name requests may give as ``model``."""
        name = self.settings.served_model_name or self.metadata.get("model_name") or self.artifact.resolve().name
        return str(name).encode("utf-8", "backslashreplace").decode()  # a file's name may be no text

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling defaults of requests, from the model's ``generation_config.json``."""
        return dict(self.metadata.get("sampling_defaults") or {}) if self.settings.generation_defaults else {}

    @property
    def max_len(self) -> int:
        """Longest prompt plus completion in tokens; 0 if there is no such limit."""
        return int(self.metadata.get("max_len") or 0)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model; if unknown, as many as a tokenizer can have."""
        return int(self.metadata.get("vocab_size") or 2**31)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer of a model that generates."""
        return eos_token_ids(self.metadata, self._tokenizer)

    @property
    def top_logprobs(self) -> int:
        """How many of the most likely tokens the graphs return."""
        return int(self.metadata.get("top_logprobs") or 0)

    def bucket_shapes(self) -> list[tuple[str, int, int]]:
        """Return name, batch and length of every bucket; 1 if its first input lacks that dimension."""
        shapes = []
        for bucket in self._manifest.buckets if self._manifest is not None else []:
            shape = bucket.inputs[0].shape if bucket.inputs else []
            shapes.append((bucket.name, shape[0] if shape else 1, shape[1] if len(shape) > 1 else 1))
        return shapes

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises RequestError if the artifact has none."""
        if self._tokenizer is None:
            instead = "" if self.task == "generate" else "; use /v1/predict with token ids"
            raise RequestError("", f"{self.model_name!r} has no tokenizer, which this route needs{instead}")
        return self._tokenizer

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
        return 0 if self._engine is None else self._engine.gate.version

    def stats(self) -> EngineStats | None:
        """Return the engine's counters, or None if there is no engine yet."""
        return None if self._engine is None else self._engine.stats()

    def health(self) -> EngineHealth | None:
        return None if self._engine is None else self._engine.health()

    def ranks(self) -> list[RankHealth]:
        """Return every rank's health, even before the engine exists."""
        if (health := self.health()) is not None:
            return health.ranks
        return [] if self._model is None else self._model.health()

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

    @property
    def room(self) -> float:
        """How many choices run and wait at most."""
        return 0 if self._engine is None else self._engine.queue.most

    def adapters(self) -> list[Adapter]:
        """Return the adapters that requests may name."""
        worker = self._engine
        return cast("Engine", worker).adapters.listed() if self.task == "generate" and worker is not None else []

    # --- the engine, for a request ------------------------------------------------------------------------

    def require_ready(self) -> Engine | OneShotEngine:
        """Return the engine. Raises EngineUnavailableError unless a request may be queued. (The engine itself ends a
        stalled step.)"""
        worker = self._engine
        if self.failure is not None or self._draining or worker is None or worker.state != "ready":
            raise self._unavailable()
        return worker

    def require_engine(self) -> Engine:
        """Return the engine that generates. Raises RequestError for an artifact of another kind."""
        worker = self.require_ready()
        if self.task != "generate":
            raise RequestError("", f"{self.model_name!r} was not traced for generation")
        return cast("Engine", worker)

    def require_oneshot(self) -> OneShotEngine:
        """Return the engine of one-shot calls. Raises RequestError for an artifact of another kind."""
        worker = self.require_ready()
        if self.task == "generate":
            raise RequestError("", f"{self.model_name!r} was traced for generation: use {self.main_route}")
        return cast("OneShotEngine", worker)
