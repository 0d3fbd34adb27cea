"""The outputs of a step by row and position: one position per verified guess, else one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StepOutputs:
    """The outputs of one step of ``batch`` rows, as arrays or tensors."""

    def __init__(self, outputs: Mapping[str, Any], batch: int):
        self._outputs, self._batch = outputs, batch
        self.tokens: list[list[int]] = self._rows("token").tolist()
        """[row][place]"""
        self._logprobs = self._rows("logprob").tolist() if "logprob" in outputs else None

    def _rows(self, name: str) -> Any:
        output = self._outputs[name]
        return output if output.ndim == 2 else output.reshape(self._batch, -1)

    def logprob(self, row: int, place: int) -> float:
        return 0.0 if self._logprobs is None else self._logprobs[row][place]

    def top(self, row: int, place: int, count: int) -> tuple[tuple[int, float], ...]:
        """The ``count`` likeliest tokens and their log-probabilities, best first."""
        shape = (self._batch, len(self.tokens[row]), -1)
        ids = self._outputs["top_ids"].reshape(shape)[row, place, :count].tolist()
        values = self._outputs["top_logprobs"].reshape(shape)[row, place, :count].tolist()
        return tuple((token, value) for token, value in zip(ids, values, strict=True) if token >= 0)
