"""The served model, as described by the artifact's manifest and the text files beside its graphs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import ModelConfigError
from nxd_server.engine.request import eos_token_ids
from nxd_server.engine.speculation import check_speculate
from nxd_server.errors import GenerateOnlyError, RequestError, SettingsError
from nxd_server.settings import ServerSettings
from nxd_server.text import reasoning
from nxd_server.text.chat_template import TemplateSources
from nxd_server.text.reasoning import Tags, tags_of
from nxd_server.text.template_process import BoundedTemplate
from nxd_server.text.tokenizer import Tokenizer
from nxd_server.text.tool_calls import TAGS, format_of

if TYPE_CHECKING:
    from nxd_infer.artifact.manifest import Manifest
    from nxd_infer.artifact.reader import LoadedArtifact

logger = logging.getLogger("nxd_server.service")

ROUTES = {"generate": "/v1/completions or /v1/chat/completions", "embed": "/v1/embeddings", "classify": "/v1/classify"}


class ServedModel:
    """One artifact; at first only its directory may be known."""

    def __init__(self, artifact: Path, settings: ServerSettings):
        self.artifact = artifact
        self.settings = settings
        self._manifest: Manifest | None = None
        self._tokenizer: Tokenizer | None = None
        self.chat_template: BoundedTemplate | None = None
        self.tool_format: str | None = None
        """Of the model's tool calls; see :mod:`nxd_server.text.tool_calls`. None: its template takes no tools."""
        self.reasoning_tags: Tags | None = None
        """Between which the model reasons; see :mod:`nxd_server.text.reasoning`. None: it does not."""

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
        name = self.settings.served_model_name or self.metadata.get("model_name")
        return str(name or self.artifact.resolve().name)

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

    @property
    def continues_prompts(self) -> bool:
        """Whether an answer continues its prompt; otherwise it is a new text."""
        return not self.metadata.get("encodes_prompts")

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

    # --- loading ---------------------------------------------------------------------------

    def _check_task(self) -> None:
        """Reject settings that the artifact does not support, before its ranks take seconds to start."""
        settings = self.settings
        if self.task != "generate":
            for name in ("lora", "speculate"):
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

    def _read_text(self, task: str, artifact: LoadedArtifact) -> None:
        """Read the tokenizer and the chat template that the manifest lists."""
        if task not in ROUTES:
            return
        try:
            self._tokenizer = Tokenizer.from_dir(artifact)
        except ModelConfigError as error:
            logger.warning("no tokenizer, so this model can only be used through LLM: %s", error)
        else:
            if task == "generate":
                self._use_template(TemplateSources.from_dir(artifact))
                if self.chat_template is None:
                    logger.info(
                        "no chat template, so /v1/chat/completions is refused: use /v1/completions, or trace a "
                        "model that has a chat_template.jinja"
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
        asked = settings.reasoning_parser
        self.reasoning_tags = tags_of(templates) if asked == "auto" else reasoning.FORMATS.get(asked)
        if self._tokenizer is not None:
            tags = [*TAGS.get(self.tool_format or "", ()), *(self.reasoning_tags or ())]
            self._tokenizer = self._tokenizer.showing(tags)
        template = BoundedTemplate(sources, settings.render_timeout, settings.max_queued_requests)
        self.chat_template = template  # first, so that closing can end it during the check
        template.check()
