"""Run texts through an encoder: an embedding or a classifier's logits per text, or per token; what logits mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import torch

from nxd_infer.errors import ArtifactVersionError, ModelConfigError
from nxd_server.engine.oneshot_engine import OneShotEngine, Outputs
from nxd_server.engine.request import check_prompt, truncation
from nxd_server.errors import RequestError
from nxd_server.text.tokenizer import Tokenizer

Tokens = tuple[list[int], list[int]]
"""The token ids of a text, and their token type ids."""
OUTPUT_OF_TASK = {"embed": "embedding", "classify": "logits", "token-classification": "logits"}
SCORES = ("sigmoid", "softmax", "none", "regression")


@dataclass(frozen=True)
class Encoded:
    """The result for one text."""

    values: torch.Tensor
    """float32: the embedding [hidden], the logits [labels], or those of each token [tokens, labels]."""
    tokens: int
    """Number of tokens of the text, including special tokens."""


class TextEncoder:
    """Tokenizes, checks and submits texts to a :class:`OneShotEngine`, which does all waiting."""

    def __init__(self, engine: OneShotEngine, tokenizer: Tokenizer):
        """Raises ModelConfigError if the artifact is neither an embedder nor a classifier, ArtifactVersionError for a
        classifier whose kind of scores is unknown."""
        metadata = engine.model.manifest.metadata
        task = metadata.get("task")
        if task not in OUTPUT_OF_TASK:
            raise ModelConfigError(f"the artifact's task is {task!r}, not one of {', '.join(OUTPUT_OF_TASK)}")
        self.engine = engine
        self.tokenizer = tokenizer
        self.task: str = task
        self.labels: list[str] = [str(label) for label in metadata.get("labels") or []]
        self.scores = scores_of(metadata)
        """The meaning of a classifier's logits."""
        self.prompts: dict[str, str] = metadata.get("prompts") or {}
        """By name, the prompts to prepend to a text, from the sentence-transformers files."""
        self._default_prompt: str | None = metadata.get("default_prompt")
        inputs = [spec for bucket in engine.model.manifest.buckets for spec in bucket.inputs]
        self._names = dict.fromkeys(spec.name for spec in inputs)
        if "input_ids" not in self._names:
            raise ModelConfigError(f"the artifact has no input 'input_ids' (it takes {', '.join(self._names)})")
        longest = max(spec.shape[1] for spec in inputs if spec.name == "input_ids")
        self.max_len = min(longest, int(metadata.get("max_len") or longest))
        self._vocab_size = int(metadata.get("vocab_size") or tokenizer.vocab_size)

    def tokens(
        self,
        text: str | tuple[str, str] | Sequence[int],
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        field: str = "input",
    ) -> Tokens:
        """Return the token ids, and their types, of a text, of a pair of texts as one input, or of token ids.

        ``prompt_name``: the prompt in :attr:`prompts` to prepend to a text; None: the model's default, if it has one.
        Nothing is prepended to pairs and token ids.
        ``truncate_prompt_tokens``: truncate to this many tokens, including special ones; -1: to as many as fit.

        Raises RequestError naming ``field``, and PromptTooLongError.
        """
        most = truncation(truncate_prompt_tokens, self.max_len)
        if parts := self.parts(text, prompt_name):
            return self.tokenizer.encode_with_types(*parts, field=field, most=most, limit=self.max_len)
        ids = cast("Sequence[int]", text)[:most]
        return check_prompt(ids, self._vocab_size, self.max_len, field, completes=False), [0] * len(ids)

    def submit(self, tokens: Tokens, *, field: str = "input", **how: Any) -> Future[Encoded]:
        """Encode the result of :meth:`tokens`; ``how``, and errors: as for :meth:`OneShotEngine.submit`. RequestError
        without tokens."""
        ids, types = tokens
        if not ids:
            raise RequestError(field, "has no tokens")
        tensors = {
            "input_ids": torch.tensor([ids], dtype=torch.int64),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
            "token_type_ids": torch.tensor([types], dtype=torch.int64),
        }
        name, count = OUTPUT_OF_TASK[self.task], len(ids)

        def convert(outputs: Outputs) -> Encoded:
            return Encoded(outputs[name][0].float(), count)

        inputs = {key: value for key, value in tensors.items() if key in self._names}
        return self.engine.submit(inputs, convert=convert, **how)

    def parts(self, text: str | tuple[str, str] | Sequence[int], prompt_name: str | None) -> tuple[str, ...]:
        """Return the one or two texts to tokenize, a text with the model's prompt prepended; none for token ids."""
        if isinstance(text, str):
            if prompt_name is not None and prompt_name not in self.prompts:
                known = ", ".join(self.prompts) or "none"
                raise RequestError("prompt_name", f"this model has no prompt {prompt_name[:100]!r}; it has {known}")
            name = self._default_prompt if prompt_name is None else prompt_name
            return (self.prompts.get(name or "", "") + text,)
        if prompt_name is not None:
            raise RequestError("prompt_name", "a prompt is put in front of a text alone, not of token ids or of a pair")
        pair = isinstance(text, tuple) and all(isinstance(part, str) for part in text)
        return cast("tuple[str, ...]", text) if pair and len(text) == 2 else ()


def scores_of(metadata: Mapping[str, Any]) -> str:
    """Return ``sigmoid`` (independent labels), ``softmax`` (exclusive labels), ``none`` (the logits are the scores) or
    ``regression`` (so they are, but those of a pair have a sigmoid, as sentence-transformers has it).

    Raises ArtifactVersionError for an unknown value.
    """
    scores = metadata.get("scores", "none")
    if scores not in SCORES:
        raise ArtifactVersionError(
            f"the artifact's scores = {scores!r}: this version knows {', '.join(SCORES)}; trace the model again with "
            "it, or serve it with the version that traced it"
        )
    return scores


def probabilities(logits: torch.Tensor, scores: str) -> torch.Tensor | None:
    """Return the probabilities of ``logits`` [..., labels] according to ``scores``; None if it has none."""
    if scores in ("none", "regression"):
        return None
    return logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)


def likeliest(logits: torch.Tensor, labels: Sequence[str]) -> str:
    """Return the label of the largest of ``logits`` [labels]; its index if it has no name."""
    best = int(logits.argmax())
    return labels[best] if best < len(labels) else str(best)
