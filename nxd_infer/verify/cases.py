"""Inputs on which an artifact is compared with its model: per bucket the steps to run, of which the last counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Case = tuple[str, list[tuple[str, Tensors]]]
"""A bucket's name, and its steps: a bucket's name and inputs each."""


def generation_cases(manifest: Any, generator: torch.Generator) -> Iterator[Case]:
    """Yield ``(bucket, steps)``: the last step is compared; the steps before it fill the slots that it reads."""
    meta = manifest.metadata
    vocabulary = meta["vocab_size"]

    def step(bucket: Any, slots: list[int], starts: list[int], lengths: list[int]) -> tuple[str, Tensors]:
        shape = next(spec.shape for spec in bucket.inputs if spec.name == "tokens")
        return bucket.name, {
            "tokens": torch.randint(vocabulary, tuple(shape), generator=generator),
            "start": torch.tensor(starts),
            "length": torch.tensor(lengths),
            "block_table": torch.tensor(slots)[:, None],
        }

    lengths = {b.name: next(s.shape for s in b.inputs if s.name == "tokens") for b in manifest.buckets}
    prefills = sorted((b for b in manifest.buckets if lengths[b.name][1] > 1), key=lambda b: lengths[b.name][1])
    for bucket in prefills:  # includes the buckets that verify drafts
        rows, length = lengths[bucket.name]
        yield bucket.name, [step(bucket, list(range(rows)), [0] * rows, [length] * rows)]
    prefills = [bucket for bucket in prefills if lengths[bucket.name][0] == 1]
    single = next((b for b in manifest.buckets if lengths[b.name] == [1, 1]), None)
    for bucket in (b for b in manifest.buckets if lengths[b.name][1] == 1):
        rows = lengths[bucket.name][0]
        slots = [row % meta["slots"] for row in range(rows)]  # additional rows feed a slot's next tokens
        fill = prefills[0] if prefills else single
        steps = []
        begin = 0
        if fill is not None:
            begin = lengths[fill.name][1]
            steps = [step(fill, [slot], [0], [begin]) for slot in sorted(set(slots))]
        if begin < meta["max_len"]:
            starts = [begin + row // meta["slots"] for row in range(rows)]
            live = [int(start < meta["max_len"]) for start in starts]
            steps.append(step(bucket, slots, [start * fits for start, fits in zip(starts, live, strict=True)], live))
        yield bucket.name, steps


def one_shot_cases(manifest: Any, generator: torch.Generator) -> Iterator[Case]:
    """Yield random ids under masks of random lengths, one step per bucket."""
    vocabulary = manifest.metadata["vocab_size"]
    for bucket in manifest.buckets:
        inputs: Tensors = {}
        for spec in bucket.inputs:
            rows, columns = spec.shape
            if spec.name == "attention_mask":
                live = torch.randint(1, columns + 1, (rows, 1), generator=generator)
                inputs[spec.name] = (torch.arange(columns)[None] < live).to(spec.torch_dtype)
            elif spec.name == "input_ids":
                inputs[spec.name] = torch.randint(vocabulary, (rows, columns), generator=generator)
            else:
                inputs[spec.name] = torch.zeros(rows, columns, dtype=spec.torch_dtype)
        yield bucket.name, [(bucket.name, inputs)]


def full_inputs(bucket: Any, given: Tensors) -> Tensors:
    """Return ``given`` plus the runtime's defaults for missing inputs."""
    return {
        spec.name: given[spec.name]
        if spec.name in given
        else torch.full(tuple(spec.shape), spec.default or 0, dtype=spec.torch_dtype)
        for spec in bucket.inputs
    }
