"""The tensors of one step: inputs, filled in place (each bucket keeps its buffers, and unchanged rows are not written
again), and outputs by row and position."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np

from nxd_infer.artifact.manifest import BucketSpec, InputSpec
from nxd_infer.errors import ModelConfigError
from nxd_infer.runtime.ipc import InputBlock
from nxd_server.engine.request import Sequence
from nxd_server.engine.sampling_params import SAMPLER_DEFAULTS
from nxd_server.engine.scheduler import Row
from nxd_server.text.grammars import ban

STEP_INPUTS = ("tokens", "start", "length", "block_table")
HEAD_INPUTS = ("hidden", "ahead")
"""What a head is given besides (:class:`nxd_server.engine.draft_head.DraftHead`)."""


def check_buckets(buckets: list[BucketSpec], head: bool = False) -> None:
    """Reject, by name, graphs with an input that the engine cannot feed, or without one that a step needs. ``head``:
    those of a head."""
    for bucket in buckets:
        names = {spec.name for spec in bucket.inputs}
        if not head and names.issuperset(HEAD_INPUTS):
            raise ModelConfigError(
                f"bucket {bucket.name} is of a head, which only guesses for another model: serve that one, with this "
                "artifact as its draft"
            )
        if missing := [name for name in STEP_INPUTS if name not in names]:
            raise ModelConfigError(
                f"bucket {bucket.name} is not a generation step: it has no input {', '.join(missing)} (it takes "
                f"{', '.join(sorted(names))}). Trace the model with --task generate"
            )
        known = {*STEP_INPUTS, *SAMPLER_DEFAULTS, *(HEAD_INPUTS if head else ())}
        unknown = [spec.name for spec in bucket.inputs if spec.name not in known and spec.default is None]
        if unknown:
            raise ModelConfigError(
                f"bucket {bucket.name} needs the input {', '.join(unknown)}, which this engine cannot feed; use a "
                "server of the version that traced the artifact, or give the input a default"
            )
        tokens = tokens_input(bucket).shape
        for spec in bucket.inputs:
            one = len(tokens) == 2 and (spec.name == "tokens" or math.prod(spec.shape) == tokens[0])
            if spec.name in STEP_INPUTS and (spec.dtype != "int64" or not one):
                raise ModelConfigError(
                    f"bucket {bucket.name} is not a generation step: its input {spec.name} is {spec.dtype}"
                    f"{spec.shape}; {', '.join(STEP_INPUTS)} are int64, tokens [rows, tokens of a row] and the "
                    "others one number per row. Trace the model with --task generate"
                )
        if "token" not in {spec.name for spec in bucket.outputs}:
            raise ModelConfigError(f"bucket {bucket.name} is not a generation step: it has no output named token")


class StepInputs:
    """The input buffers of one bucket. Padding rows point to the scratch block, at position 0, with one token."""

    def __init__(self, bucket: BucketSpec, scratch: int, arrays: bool, left: Collection[str] = ()):
        """``arrays``: the model takes NumPy arrays (:class:`InputBlock`); else torch tensors over the same memory.
        ``left``: inputs that keep their defaults, whatever requests ask for."""
        self._scratch = scratch
        # Any input in neither set has a default, see check_buckets.
        known = [spec for spec in bucket.inputs if spec.name in {*STEP_INPUTS, *HEAD_INPUTS, *SAMPLER_DEFAULTS}]
        self._arrays: Mapping[str, np.ndarray]
        self.tensors: Mapping[str, Any]
        """The inputs in the form that the model takes."""
        if arrays:
            self.tensors = self._arrays = InputBlock(bucket)
        else:
            self._arrays = {spec.name: np.empty(spec.shape, spec.dtype) for spec in known}
            import torch  # slow

            self.tensors = {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        for spec in known:
            default = spec.default if spec.default is not None else SAMPLER_DEFAULTS.get(spec.name, 0)
            self._arrays[spec.name][...] = default
        written = self._arrays.keys() & SAMPLER_DEFAULTS.keys() - set(left)
        self._defaults = {name: SAMPLER_DEFAULTS[name] for name in self._arrays if name in written}
        self.batch = self._arrays["tokens"].shape[0]
        columns = [_Column(spec, self._arrays[spec.name]) for spec in known if spec.name in STEP_INPUTS]
        self._columns = {column.spec.name: column for column in columns}
        self._owners: list[tuple[int, bool] | None] = [None] * self.batch
        for index in range(self.batch):
            self.clear(index)

    def clear(self, index: int) -> None:
        """Make row ``index`` padding."""
        self._place(index, [0], 0, self._scratch)
        if self._owners[index] is not None:
            self._owners[index] = None
            for name, value in self._defaults.items():
                self._arrays[name][index] = value

    def _place(self, index: int, tokens: Rows[int], start: int, slot: int) -> None:
        """Write the inputs that change with every step."""
        columns = self._columns
        columns["tokens"].fill(index, tokens)
        columns["start"].set(index, start)
        columns["length"].set(index, len(tokens))
        columns["block_table"].set(index, slot)

    def put(self, index: int, row: Row) -> None:
        """Write the row ``row`` of a choice to row ``index``. Raises InputMismatchError for a value outside its
        limits; a model that takes tensors checks those of the sampler itself."""
        sequence, sampler = row.sequence, row.sequence.sampler
        assert sequence.slot is not None
        self._place(index, row.tokens(), row.start, sequence.slot)
        output = row.start + row.length - len(sequence.prompt)  # the index of the output token that the row gives
        if sequence.scores is not None and not row.samples:  # "draws" the prompt's next token, to have its probability
            self._write(index, sequence, False)
            self._arrays["allowed"][index] = 0
            token = sequence.prompt[row.start + 1]
            self._arrays["allowed"][index].view(np.uint32)[token // 32] = np.uint32(1 << token % 32)
            self._owners[index] = (0, False)  # nobody's: the next row is written anew
            return
        banned = bool(sampler.banned) and output < sequence.params.min_tokens
        if self._owners[index] != (sequence.id, banned):
            self._owners[index] = (sequence.id, banned)
            self._write(index, sequence, banned)
        if sequence.guided and row.samples:
            words, without = self._arrays["allowed"][index], sampler.banned if banned else ()
            if sequence.guide is not None:
                sequence.guide.allow(words, without)
            if sequence.rules is not None:
                sequence.rules.apply(words, sequence.output, None if sequence.guide else without)

    def put_hidden(self, index: int, hidden: np.ndarray, ahead: int) -> None:
        """Write what row ``index`` of a head is given: hidden states [tokens, F], maybe none, and ``ahead``."""
        self._arrays["hidden"][index, : len(hidden)] = hidden
        self._arrays["ahead"][index] = ahead

    def _write(self, index: int, sequence: Sequence, banned: bool) -> None:
        """Write the inputs of a row that stay while a choice is in it."""
        arrays, sampler = self._arrays, sequence.sampler
        for name, default in self._defaults.items():
            arrays[name][index] = sampler.values.get(name, default)
        if "prompt_length" in arrays:  # tells the penalties what is prompt and what is output
            arrays["prompt_length"][index] = len(sequence.prompt)
        for place, (token, bias) in enumerate(sampler.bias):
            arrays["bias_ids"][index, place] = token
            arrays["bias_values"][index, place] = bias
        if banned:
            ban(arrays["allowed"][index].view(np.uint32), sampler.banned)
        if isinstance(self.tensors, InputBlock):
            self.tensors.check()


class _Column:
    """One integer input with the same number of values per row. Writing a number here checks it, at a fraction of the
    cost of an array assignment."""

    def __init__(self, spec: InputSpec, column: np.ndarray):
        self.spec = spec
        self._low = -math.inf if spec.minimum is None else spec.minimum
        self._high = math.inf if spec.maximum is None else spec.maximum
        self._values = column.data.cast("B").cast("q")
        self._width = column.size // len(column)

    def set(self, index: int, value: int) -> None:
        if not self._low <= value <= self._high:
            self.spec.check(value)
        self._values[index] = value

    def fill(self, index: int, values: Rows[int]) -> None:
        """Write ``values`` to row ``index``, followed by zeros."""
        if len(values) == self._width == 1:
            self.set(index, values[0])
            return
        self.spec.check(min(values))
        self.spec.check(max(values))
        row = array("q", values)
        row.extend([0] * (self._width - len(row)))
        self._values[index * self._width : (index + 1) * self._width] = row


def tokens_input(bucket: BucketSpec) -> InputSpec:
    """Return the spec of a step's tokens: ``[rows, tokens of a row]``."""
    return next(spec for spec in bucket.inputs if spec.name == "tokens")


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
