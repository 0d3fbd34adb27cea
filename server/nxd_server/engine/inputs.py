"""The tensors of one step, filled in place: a bucket keeps its buffers, and rows that stay are not written again."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxd_infer.errors import ModelConfigError
from nxd_infer.trace.arena import InputBlock
from nxd_infer.trace.manifest import BucketSpec, InputSpec
from nxd_server.engine.params import SamplingParams
from nxd_server.engine.scheduler import Row
from nxd_server.errors import RequestError

STEP_INPUTS = ("tokens", "start", "length", "block_table")
SAMPLER_DEFAULTS: dict[str, float] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "allowed": -1,
    "bias_ids": 0,
    "bias_values": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "prompt_length": -1,
    "adapter": 0,
}
"""What the engine knows to feed, with the value that means "off"."""


@dataclass(frozen=True)
class Sampler:
    """The sampler inputs of one choice, as numbers; ``banned`` ids must not come before ``min_tokens``."""

    values: dict[str, float]
    bias: tuple[tuple[int, float], ...]
    banned: tuple[int, ...]


def check_buckets(buckets: list[BucketSpec]) -> None:
    """Refuse, by name, graphs that need an input nobody feeds, or that lack one a step needs."""
    for bucket in buckets:
        names = {spec.name for spec in bucket.inputs}
        if missing := [name for name in STEP_INPUTS if name not in names]:
            raise ModelConfigError(
                f"bucket {bucket.name} is no generation step: it has no input {', '.join(missing)} (it takes "
                f"{', '.join(sorted(names))}). Trace the model with --task generate"
            )
        known = {*STEP_INPUTS, *SAMPLER_DEFAULTS}
        unknown = [spec.name for spec in bucket.inputs if spec.name not in known and spec.default is None]
        if unknown:
            raise ModelConfigError(
                f"bucket {bucket.name} needs the input {', '.join(unknown)}, which this engine cannot feed; use a "
                "server of the version that traced the artifact, or give the input a default"
            )
        if "token" not in {spec.name for spec in bucket.outputs}:
            raise ModelConfigError(f"bucket {bucket.name} is no generation step: it has no output named token")


def sampler_of(
    params: SamplingParams, seed: int, inputs: set[str], vocab_size: int, bias_slots: int, eos: Rows[int]
) -> Sampler:
    """The sampler inputs of a choice, for graphs that take ``inputs``; RequestError when they lack what it needs."""
    values = {
        "temperature": params.temperature,
        "top_k": min(params.top_k, vocab_size),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": seed,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
    }
    for name, value in values.items():
        if name != "seed" and name not in inputs and value != SAMPLER_DEFAULTS[name]:
            raise RequestError(name, _absent(name, name))
    if not params.greedy and "seed" not in inputs:
        raise RequestError("temperature", _absent("seed", "sampling"))
    if params.logit_bias and not {"bias_ids", "bias_values"} <= inputs:
        raise RequestError("logit_bias", _absent("bias_ids", "logit_bias"))
    if len(params.logit_bias) > bias_slots:
        raise RequestError(
            "logit_bias", f"{len(params.logit_bias)} tokens are biased; this artifact was traced for {bias_slots}"
        )
    banned: tuple[int, ...] = ()
    if params.min_tokens > 0:
        banned = tuple(sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos)}))
        if banned and "allowed" not in inputs:
            raise RequestError("min_tokens", _absent("allowed", "min_tokens"))
    for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if outside := [token for token in tokens if token >= vocab_size]:
            raise RequestError(name, f"token {outside[0]} is outside the vocabulary of {vocab_size}")
    return Sampler(values, tuple(params.logit_bias.items()), banned)


def _absent(name: str, what: str) -> str:
    return f"the graphs of this artifact have no input {name!r}, so {what} cannot act; trace the model again"


class StepInputs:
    """The input buffers of one bucket. Padding rows point at the scratch block, at position 0, with one token."""

    def __init__(self, bucket: BucketSpec, scratch: int, arrays: bool):
        """``arrays``: the model takes them (:class:`InputBlock`); else torch's tensors over the same memory."""
        self._scratch = scratch
        # Any input that is neither has a default, see check_buckets.
        known = [spec for spec in bucket.inputs if spec.name in STEP_INPUTS or spec.name in SAMPLER_DEFAULTS]
        self._arrays: Mapping[str, np.ndarray]
        self.tensors: Mapping[str, Any]
        """What the model takes."""
        if arrays:
            self.tensors = self._arrays = InputBlock(bucket)
        else:
            self._arrays = {spec.name: np.empty(spec.shape, spec.dtype) for spec in known}
            self.tensors = _as_tensors(self._arrays)
        for spec in known:
            default = spec.default if spec.default is not None else SAMPLER_DEFAULTS.get(spec.name, 0)
            self._arrays[spec.name][...] = default
        self._defaults = {name: SAMPLER_DEFAULTS[name] for name in self._arrays if name in SAMPLER_DEFAULTS}
        self.batch = self._arrays["tokens"].shape[0]
        self._owners: list[tuple[int, bool] | None] = [None] * self.batch
        for index in range(self.batch):
            self.clear(index)

    def clear(self, index: int) -> None:
        """Make row ``index`` padding."""
        arrays = self._arrays
        arrays["tokens"][index] = 0
        arrays["start"][index] = 0
        arrays["length"][index] = 1
        arrays["block_table"][index] = self._scratch
        if self._owners[index] is not None:
            self._owners[index] = None
            for name, value in self._defaults.items():
                arrays[name][index] = value

    def put(self, index: int, row: Row, sampler: Sampler) -> None:
        """Make row ``index`` the piece ``row`` of its choice."""
        sequence, arrays = row.sequence, self._arrays
        tokens = arrays["tokens"][index]
        tokens[: row.length] = row.tokens()
        if row.length < len(tokens):
            tokens[row.length :] = 0
        arrays["start"][index] = row.start
        arrays["length"][index] = row.length
        arrays["block_table"][index] = sequence.slot
        output = row.start + row.length - len(sequence.prompt)  # the place of the token that the row gives
        banned = bool(sampler.banned) and output < sequence.params.min_tokens
        if self._owners[index] == (sequence.id, banned):
            return
        self._owners[index] = (sequence.id, banned)
        for name, default in self._defaults.items():
            arrays[name][index] = sampler.values.get(name, default)
        if "prompt_length" in arrays:  # tells the penalties what is prompt and what is output
            arrays["prompt_length"][index] = len(sequence.prompt)
        for place, (token, bias) in enumerate(sampler.bias):
            arrays["bias_ids"][index, place] = token
            arrays["bias_values"][index, place] = bias
        if banned:
            allowed = arrays["allowed"][index].view(np.uint32)
            for token in sampler.banned:
                allowed[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


def tokens_input(bucket: BucketSpec) -> InputSpec:
    """The tokens of a step: ``[rows, tokens of a row]``."""
    return next(spec for spec in bucket.inputs if spec.name == "tokens")


def _as_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}
