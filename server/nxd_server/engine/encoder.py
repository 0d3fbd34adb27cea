"""Texts through an encoder: tokens in, one vector (an embedding, or a classifier's logits) out for each text."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeGuard

import torch

from nxd_infer.errors import ModelConfigError
from nxd_server.engine.oneshot import OneShotEngine, Outputs
from nxd_server.engine.request import check_token_ids
from nxd_server.engine.weights import WholeRequest
from nxd_server.errors import PromptTooLongError, RequestError
from nxd_server.text.tokenizer import Tokenizer

OUTPUT_OF_TASK = {"embed": "embedding", "classify": "logits"}


@dataclass(frozen=True)
class Encoded:
    """The result for one text."""

    values: torch.Tensor
    """float32: the embedding [hidden], or the logits [labels]."""
    tokens: int
    """How many tokens the text had, special ones included."""


def is_pair(value: object) -> TypeGuard[tuple[str, str]]:
    """Whether it is two texts."""
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(text, str) for text in value)


class TextEncoder:
    """Tokenize, check and submit texts to a :class:`OneShotEngine`; long waits are the engine's."""

    def __init__(self, engine: OneShotEngine, tokenizer: Tokenizer):
        """Raises ModelConfigError when the artifact is neither an embedder nor a classifier."""
        metadata = engine.model.manifest.metadata
        task = metadata.get("task")
        if task not in OUTPUT_OF_TASK:
            raise ModelConfigError(f"the artifact's task is {task!r}, not one of {', '.join(OUTPUT_OF_TASK)}")
        self.engine = engine
        self.tokenizer = tokenizer
        self.task: str = task
        self.labels: list[str] = [str(label) for label in metadata.get("labels") or []]
        specs = {spec.name: spec for bucket in engine.model.manifest.buckets for spec in bucket.inputs}
        if "input_ids" not in specs:
            raise ModelConfigError(f"the artifact has no input 'input_ids' (it takes {', '.join(specs)})")
        self._names = set(specs)
        longest = max(
            spec.shape[1]
            for bucket in engine.model.manifest.buckets
            for spec in bucket.inputs
            if spec.name == "input_ids"
        )
        self.max_len = min(longest, int(metadata.get("max_len") or longest))
        self._vocab_size = int(metadata.get("vocab_size") or tokenizer.vocab_size)

    def submit(
        self,
        text: str | tuple[str, str] | Sequence[int],
        *,
        timeout: float | None = None,
        field: str = "input",
        continuing: bool = False,
        whole: WholeRequest | None = None,
    ) -> Future[Encoded]:
        """Encode one text, a pair of them as one input, or token ids taken as they are.

        Raises RequestError naming ``field``, PromptTooLongError, and what :meth:`OneShotEngine.submit` raises.
        """
        if isinstance(text, str) or is_pair(text):
            first, second = (text, None) if isinstance(text, str) else text
            ids, types = self.tokenizer.encode_with_types(first, second, field=field)
        else:
            ids = check_token_ids(text, self._vocab_size, field)
            types = [0] * len(ids)
        if not ids:
            raise RequestError(field, "has no tokens")
        if len(ids) > self.max_len:
            raise PromptTooLongError(len(ids), self.max_len, self.max_len, field, completes=False)
        tensors = {
            "input_ids": torch.tensor([ids], dtype=torch.int64),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
            "token_type_ids": torch.tensor([types], dtype=torch.int64),
        }
        name, count = OUTPUT_OF_TASK[self.task], len(ids)

        def convert(outputs: Outputs) -> Encoded:
            return Encoded(outputs[name][0].float(), count)

        inputs = {key: value for key, value in tensors.items() if key in self._names}
        return self.engine.submit(inputs, timeout=timeout, convert=convert, continuing=continuing, whole=whole)
