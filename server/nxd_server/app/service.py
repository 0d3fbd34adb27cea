"""The service: one artifact's copies, its tokenizer and chat template, and their current state.

The service starts in its own threads, so that the HTTP layer answers ``/livez`` from the first moment; it is ready
once the ranks of a copy have completed a step. The graphs run in the rank processes, never in this one. If the last
copy is given up, the service reports that the process should exit, so that a supervisor can replace it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nxd_infer.errors import ArtifactError, NxdError
from nxd_infer.hugging_face.tokenizer import TOKENIZER
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.memory_plan import plan_memory
from nxd_infer.runtime.rank_model import RankModel, takes_arrays
from nxd_infer.runtime.supervisor.cores import default_threads
from nxd_server import engine  # its names are imported on first use, once the ranks' processes run
from nxd_server.app.replica import Replica, cannot_serve
from nxd_server.engine.request import eos_token_ids
from nxd_server.engine.speculation import check_speculate
from nxd_server.engine.step_tensors import check_buckets
from nxd_server.errors import (
    EngineUnavailableError,
    GenerateOnlyError,
    RequestError,
    SettingsError,
    WeightsBusyError,
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
from nxd_server.threads import at_once

if TYPE_CHECKING:
    from nxd_infer.artifact.manifest import InputSpec, Manifest
    from nxd_infer.artifact.reader import LoadedArtifact
    from nxd_infer.runtime.model import TensorParallelModel
    from nxd_infer.runtime.ranks import RankHealth
    from nxd_server.engine import Engine, EngineStats, OneShotEngine, TextEncoder
    from nxd_server.engine.adapter_slots import Adapter

logger = logging.getLogger("nxd_server.service")

SPAWN_SECONDS = 1.0
IDLE_PROBE_SECONDS = 2.0
ROLL_SECONDS = 0.05
BUSIER = 4
"""A prompt goes to the copy that holds its start, if that has at most one BUSIERth of its slots more in use than the
copy with least to do."""
ROUTES = {"generate": "/v1/completions or /v1/chat/completions", "embed": "/v1/embeddings", "classify": "/v1/classify"}
ROUTES["token-classification"] = ROUTES["classify"]


class Service:
    """One model: its artifact, and everything that serves it.

    Args:
        artifact: the artifact's directory.
        settings: the server's settings.
        on_failure: called once, from another thread, with the reason, when the process should end.
        ranks: of all models of this server, which share the cores; by default this one's.
        slots: of the cache that are used; by default all that were traced.
    """

    def __init__(
        self,
        artifact: str | Path,
        settings: ServerSettings,
        on_failure: Callable[[str], None] | None = None,
        ranks: int | None = None,
        slots: int | None = None,
    ):
        self.artifact = Path(artifact)
        self.settings = settings
        self.chat_template: BoundedTemplate | None = None
        self.tool_format: str | None = None
        """Of the model's tool calls; see :mod:`nxd_server.text.tool_calls`. None: its template takes no tools."""
        self.reasoning_tags: Tags | None = None
        """Between which the model reasons; see :mod:`nxd_server.text.reasoning`. None: it does not."""
        self.created = int(time.time())
        self.failure: str | None = None
        """Why the service can never be ready again."""
        self.stage = "loading the artifact"
        self.replicas = [Replica(self, index) for index in range(settings.replicas)]
        self._on_failure = on_failure
        self._ranks = ranks
        self._slots = slots
        self._lock = threading.Lock()
        self._closing = False
        self._draining = False
        self._spawned = threading.Event()
        self._verifying = threading.Lock()
        self._unverified: list[LoadedArtifact] = []
        self._changing = threading.Lock()
        self._artifact: LoadedArtifact | None = None
        self._draft: LoadedArtifact | None = None
        self._manifest: Manifest | None = None
        self._tokenizer: Tokenizer | None = None
        self._text: Future[None] = Future()
        """Done once the tokenizer and the template have been read."""
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
            self._open()
            with self._lock:
                if self._closing:
                    return
                for replica in self.replicas:
                    replica.start()
        except BaseException as error:  # nothing ends this thread without a word
            self._spawned.set()
            if not self._closing:
                self._fail(cannot_serve(error))
            return
        try:
            self._read_text(self._loaded)
            if self.settings.admin():  # its holder may change weights, and sharding them needs torch: import it now
                import nxd_infer.runtime.updates.adapters  # noqa: F401  # slow: torch
            self._text.set_result(None)
        except BaseException as error:
            self._text.set_exception(error)

    def _open(self) -> None:
        """Read the manifest, and reject settings that do not go with it."""
        settings = self.settings
        logger.info("loading %s", self.artifact)
        artifact = load_artifact(str(self.artifact), expect_digest=settings.expect_digest, later=True)
        artifact.check_kernel(settings.allow_kernel)
        self._artifact, self._manifest = artifact, artifact.manifest
        self._check_task()
        self._unverified = [artifact, *([self._draft] if self._draft is not None else [])]
        degree, copies = artifact.manifest.world_size, len(self.replicas)
        which = f" of each of {copies} copies" if copies > 1 else ""
        self.stage = f"starting {degree} rank{'s' if degree > 1 else ''}{which}"
        logger.info("%s: %s", self.model_name, self.stage)
        swaps = settings.admin() is not None
        draft = None if self._draft is None else self._draft.manifest
        planned = plan_memory(artifact.manifest, self._slots, swaps=swaps, draft=draft)
        logger.info("%s: memory%s: about %s", self.model_name, which, planned.text())
        if self._draft is not None:
            most = settings.speculate or self.metadata["speculate"]
            logger.info("%s: the draft model %s guesses up to %d tokens a step", self.model_name, settings.draft, most)

    def wait_text(self, model: RankModel) -> None:
        """Wait until the tokenizer and the template have been read. Raises what kept them from it, or ArtifactError."""
        wait([self._text], model.bounds.start)
        if not self._text.done():
            raise ArtifactError(
                f"reading the tokenizer has taken more than {model.bounds.start:.0f} s: raise start_timeout if the "
                "disk is slow"
            )
        self._text.result()

    def _check_task(self) -> None:
        """Reject settings that the artifact does not support, before its ranks take seconds to start."""
        settings = self.settings
        if settings.replicas > 1 and self.task != "generate" and self.manifest.states:
            raise SettingsError(
                f"replicas = {settings.replicas}: this model keeps a state from call to call, so it has one copy"
            )
        if self.task != "generate":
            for name in ("lora", "speculate", "draft", "chat_template"):
                if getattr(settings, name):
                    raise GenerateOnlyError(name, self.task)
            return
        if settings.lora and self._manifest is not None and not self._manifest.layout.get("adapters"):
            raise SettingsError(
                f"lora = {','.join(settings.lora)!r}: this artifact has no slots for adapters; trace the model again "
                "with --lora-slots"
            )
        check_buckets(self.manifest.buckets)
        if settings.speculate or settings.draft:
            for_draft = f"--draft {settings.draft}: the model {self.artifact}" if settings.draft else ""
            check_speculate(self.metadata, settings.speculate, for_draft)
        if settings.draft is not None:
            from nxd_server.engine.draft_model import check_draft, check_tokenizers

            self._draft = load_artifact(settings.draft, later=True)
            self._draft.check_kernel(settings.allow_kernel)
            check_draft(self.manifest, self._draft.manifest)
            check_tokenizers(self._loaded, self._draft)

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

    @property
    def _loaded(self) -> LoadedArtifact:
        assert self._artifact is not None, "the manifest is read first"
        return self._artifact

    def make_draft(self) -> RankModel | None:
        """Return a model that makes drafts for another of :meth:`make_model`, whose cores it shares, if one is set."""
        return None if self._draft is None else self.make_model(self._draft)

    def make_model(self, artifact: LoadedArtifact | None = None) -> RankModel:
        """Return a model of the artifact (default: the one that is served), whose files may not be hashed yet.

        The engine for generation makes no tensors, so its server does not import torch, and hashes while the ranks do.
        """
        artifact, settings = artifact or self._loaded, self.settings
        manifest = artifact.manifest
        options: dict[str, Any] = {name: getattr(settings, name) for name in ("call_timeout", "start_timeout")}
        ranks = self._ranks or manifest.world_size * len(self.replicas)
        threads = settings.threads_per_rank or default_threads(ranks, manifest.target.get("threads"))

        def before_load() -> None:
            self._spawned.set()
            with self._verifying:  # one copy does it, the others wait
                while self._unverified:
                    self._unverified[0].verify(again=False)
                    del self._unverified[0]

        if self.task == "generate" and takes_arrays(manifest):
            model = RankModel(artifact, before_load=before_load, threads_per_rank=threads, **options)
        else:
            before_load()
            from nxd_infer.runtime.model import TensorParallelModel  # slow: torch

            model = TensorParallelModel(artifact, in_process=False, threads_per_rank=threads, **options)
        model.bounds.patient = True  # its replica watches the first step, which may be slow
        return model

    def make_engine(self, model: RankModel, draft: RankModel | None = None) -> Engine | OneShotEngine:
        """Return an engine for ``model``, with the adapters of the settings."""
        settings = self.settings
        names = ("max_queued_requests", "max_queued_tokens", "max_queue_wait")
        options: dict[str, Any] = {name: getattr(settings, name) for name in names}
        options |= {"restart_limit": settings.max_restarts, "idle_probe": IDLE_PROBE_SECONDS}
        if self.task != "generate":
            return engine.OneShotEngine(cast("TensorParallelModel", model), **options)
        options |= {name: getattr(settings, name) for name in ("stall_ratio", "speculate", "prefix_caching")}
        worker = engine.Engine(model, self._tokenizer, draft=draft, slots=self._slots, **options)
        worker.adapters.taken_names = self.model_names
        for name, _, path in (word.partition("=") for word in settings.lora):
            worker.adapters.load(name, path)
        return worker

    def make_encoder(self, worker: Engine | OneShotEngine) -> TextEncoder | None:
        """Return the encoder of texts for an engine; None for one of another kind, or without a tokenizer."""
        if self.task == "generate" or self.task not in ROUTES or self._tokenizer is None:
            return None
        return engine.TextEncoder(cast("OneShotEngine", worker), self._tokenizer)

    def lost(self, replica: Replica) -> None:
        """Take note that a copy was given up: the others go on, if it once was ready."""
        reason = replica.failure or ""
        left = [other for other in self.replicas if other.failure is None]
        if left and replica.load_seconds is not None:
            logger.critical("giving up %s, %d of %d copies go on: %s", replica, len(left), len(self.replicas), reason)
        elif self.failure is None:
            self._fail(reason)

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
        return all(at_once([functools.partial(worker.drain, timeout) for _, worker in self._running()]))

    def close(self) -> None:
        """End everything; running requests fail. The ranks have exited when this returns."""
        with self._lock:
            self._closing = True
        if self.chat_template is not None:
            self.chat_template.stop()
        at_once([replica.close for replica in self.replicas])

    def _running(self) -> list[tuple[Replica, Engine | OneShotEngine]]:
        """Return the copies that have an engine and are not given up."""
        return [(one, one.engine) for one in self.replicas if one.failure is None and one.engine is not None]

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
    def model_names(self) -> list[str]:
        """The names requests may give as ``model``; answers have the first."""
        own = self.metadata.get("model_name") or self.artifact.resolve().name
        # A file's name may be no text.
        return self.settings.served_model_name or [str(own).encode("utf-8", "backslashreplace").decode()]

    @property
    def model_name(self) -> str:
        return self.model_names[0]

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
        # Of any copy, also while it takes no requests: answers that are ready are finished with it.
        encoder = next((one.encoder for one in self.replicas if one.encoder is not None), None)
        if encoder is None:
            raise self._unavailable()
        return encoder

    def input_specs(self) -> dict[str, InputSpec]:
        """Return the inputs by name, as declared by the first bucket that has them."""
        return {spec.name: spec for bucket in reversed(self.manifest.buckets) for spec in bucket.inputs}

    # --- state ------------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, str, str]:
        """Return whether a request sent now would be served, the state, and the reason if not: of the copy that is
        nearest to it."""
        if self.failure is not None:
            return False, "failed", self.failure
        if self._draining:
            return False, "draining", "the server is shutting down"
        states = [replica.readiness() for replica in self.replicas]
        return max(states, key=lambda state: (state[0], state[1] != "failed"))

    @property
    def ready(self) -> bool:
        return self.readiness()[0]

    @property
    def load_seconds(self) -> float | None:
        """Seconds until the first copy was ready."""
        return min((one.load_seconds for one in self.replicas if one.load_seconds is not None), default=None)

    @property
    def weight_version(self) -> int:
        """How often the weights of every copy were swapped since the artifact was loaded."""
        return min((worker.gate.version for _, worker in self._running()), default=0)

    def stats(self) -> EngineStats | None:
        """Return the counters of all copies together, or None if there is no engine yet."""
        stats = [replica.engine.stats() for replica in self.replicas if replica.engine is not None]
        return stats[0].together(stats[1:]) if stats else None

    def ranks(self) -> list[RankHealth]:
        """Return every rank's health, even before the engines exist; those of the second copy are numbered on."""
        return [rank for replica in self.replicas for rank in self.ranks_of(replica)]

    def ranks_of(self, replica: Replica) -> list[RankHealth]:
        """Return those of one copy."""
        before = 0 if self._manifest is None else self._manifest.world_size * replica.index
        return [dataclasses.replace(rank, rank=before + rank.rank) for rank in replica.ranks()]

    def _unavailable(self) -> EngineUnavailableError:
        ready, state, reason = self.readiness()
        if ready:  # since the caller looked
            state, reason = "recovering", "its ranks are ready again"
        retry = None if state in ("failed", "draining") else 5.0
        return EngineUnavailableError(f"the server takes no requests now: {reason or state}", state, retry)

    @property
    def loaded(self) -> bool:
        """Whether the artifact's manifest has been read."""
        return self._manifest is not None

    def require_loaded(self) -> None:
        """Raise EngineUnavailableError until the artifact has been read."""
        if not self.loaded:
            raise self._unavailable()

    @property
    def room(self) -> float:
        """How many choices of one request run and wait at most."""
        return max((worker.queue.most for _, worker in self._running()), default=0)

    # --- a copy, for a request ------------------------------------------------------------------------

    def choose(
        self,
        prompt: Sequence[int] = (),
        adapter: str | None = None,
        salt: Hashable = None,
        avoid: Collection[Replica] = (),
    ) -> Replica:
        """Return the copy for a request: the one that holds most of its prompt, if it has little more to do than the
        one that has least; that one otherwise.

        Raises EngineUnavailableError unless a request may be queued in one that is not to be avoided.
        """
        able = [one for one in self._running() if one[0].serves and one[0] not in avoid]
        if self.failure is not None or self._draining or not able:
            raise self._unavailable()
        free = [one for one in able if not one[0].stalls] or able
        least = min(free, key=lambda one: (one[1].queue.inside, one[1].queue.submitted))
        if prompt and len(free) > 1:
            held = {replica: cast("Engine", worker).held(prompt, adapter, salt) for replica, worker in free}
            best = max(free, key=lambda one: (held[one[0]], one is least))
            more = best[1].queue.inside - least[1].queue.inside
            if held[best[0]] and more <= max(1, best[1].queue.capacity // BUSIER):
                return best[0]
        return least[0]

    def require_ready(self) -> Engine | OneShotEngine:
        """Return the engine of a copy. Raises EngineUnavailableError unless a request may be queued."""
        return cast("Engine | OneShotEngine", self.choose().engine)

    def require_engine(self) -> Engine:
        """Return an engine that generates. Raises RequestError for an artifact of another kind."""
        worker = self.require_ready()
        if self.task != "generate":
            raise RequestError("", f"{self.model_name!r} was not traced for generation")
        return cast("Engine", worker)

    # --- changes, made in one copy after the other, so that the others answer meanwhile ---------------------

    def update_weights(self, path: Path, tag: str | None, timeout: float) -> int:
        """Swap the weights of every copy; return their version. Each copy has ``timeout`` seconds.

        Raises as the engines do; WeightsBusyError, too, if only some copies could be changed.
        """
        version = 1 + max((worker.gate.version for _, worker in self._running()), default=0)

        def swap(worker: Engine | OneShotEngine) -> None:
            worker.update_weights(path, tag=tag, timeout=timeout, version=version)

        self._roll(swap, timeout, f"have the new weights (version {version}), the others the old ones")
        return version

    def restart(self, timeout: float) -> None:
        """Start the ranks of every copy anew, between requests. Each copy has ``timeout`` seconds to begin."""
        self._roll(lambda worker: worker.restart_ranks(timeout), timeout, "have new ranks")

    def _roll(self, change: Callable[[Engine | OneShotEngine], None], timeout: float, done: str) -> None:
        if not self._changing.acquire(blocking=False):
            raise WeightsBusyError
        changed = 0
        try:
            self.require_ready()
            for replica, worker in self._running():
                end = time.monotonic() + timeout
                while worker.state == "recovering" and replica.failure is None and time.monotonic() < end:
                    time.sleep(ROLL_SECONDS)
                change(worker)
                changed += 1
        except NxdError as error:
            if not changed:
                raise
            raise WeightsBusyError(
                f"{changed} of {len(self.replicas)} copies {done}, because of this: {summary(error)}; send it again"
            ) from error
        finally:
            self._changing.release()

    def adapters(self) -> list[Adapter]:
        """Return the adapters that requests may name."""
        workers = [cast("Engine", worker) for _, worker in self._running()] if self.task == "generate" else []
        # The last copy gets an adapter last, and loses it first.
        last = workers[-1].adapters.listed() if workers else []
        found = {adapter.name: dataclasses.replace(adapter) for adapter in last}
        for worker in workers[:-1]:
            for adapter in worker.adapters.listed():
                if adapter.name in found:
                    found[adapter.name].running += adapter.running
        return list(found.values())

    def adapter_named(self, name: str | None) -> str | None:
        """Return the adapter that a request names as its model; None for the model itself."""
        return None if name is None or name in self.model_names else name

    def load_adapter(self, name: str, path: Path, timeout: float) -> Adapter:
        """Load an adapter into every copy, or into none. Raises as :meth:`Adapters.load`."""
        self.require_engine().adapters.check(name)
        loaded: list[Engine] = []
        if not self._changing.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            raise WeightsBusyError(f"another change of the weights was not over after {timeout:g} s; try again")
        try:
            for _, worker in self._running():
                adapter = cast("Engine", worker).adapters.load(name, path, timeout)
                loaded.append(cast("Engine", worker))
        except BaseException:
            for worker in loaded:
                worker.adapters.remove(name)
            raise
        finally:
            self._changing.release()
        return adapter

    def remove_adapter(self, name: str) -> Adapter:
        """Withdraw an adapter from every copy. Raises UnknownModelError if there is none."""
        self.require_engine()
        removed = [cast("Engine", worker).adapters.remove(name) for _, worker in reversed(self._running())]
        return dataclasses.replace(removed[0], running=sum(adapter.running for adapter in removed))
