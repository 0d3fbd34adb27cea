"""The memory that serving an artifact takes, from its manifest alone: before anything is loaded.

Of each rank: weights as they are held (packed, or mapped from the file), states at their full size, such as the slots
of a cache, working memory of the largest bucket, and the process itself. A slot that nobody uses takes no memory on a
CPU, so a server may use fewer than were traced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.backends import registry
from nxd_infer.errors import MemoryBudgetError
from nxd_infer.util.units import size

# Measured on Linux (torch 2.13) as the proportional set size of all processes, after prompts and answers had filled the
# cache; tests/integration/e2e/test_memory_plan.py measures again, and fails if a plan is off by more than 10 %.
RANK_BYTES = 113 << 20
"""A rank's process besides what it shares with others."""
SHARED_BYTES = 118 << 20
"""Python and torch, which ranks share; and the process that they are forked from."""
SERVER_BYTES = 80 << 20
"""The server's process: tokenizer, HTTP."""
CUTTING_BYTES = 125 << 20
"""Torch in the server's process, to cut new weights for the ranks."""
ACTIVATIONS = 8
"""Of a token at a time, each as wide as the widest layer."""


def process_bytes(processes: int) -> int:
    """Return the memory of a server and the processes of its ranks, without their tensors."""
    return SERVER_BYTES + SHARED_BYTES + processes * RANK_BYTES


def rows_of(inputs: Iterable[tuple[Sequence[int], str | None]]) -> int:
    """Return the rows of activations of a bucket, from the shapes and roles of its inputs: its tokens, or of a model
    that has none the rows of its longest input."""
    known = list(inputs)
    tokens = [math.prod(shape) for shape, role in known if role == "tokens"]
    return max(tokens or [math.prod(shape[:-1]) for shape, _ in known], default=0)


def activation_bytes(
    tokens: int, weights: Iterable[tuple[Sequence[int], int]], vocabulary: int | None, tp_degree: int
) -> int:
    """Return a rank's working memory for a bucket of ``tokens``, of the shapes and bytes of its weights. Tables of the
    ``vocabulary``, which may be divided over the ranks, do not count: only last tokens get logits."""
    rows = [] if vocabulary is None else [vocabulary, -(-vocabulary // tp_degree)]
    wide = (nbytes // shape[1] for shape, nbytes in weights if len(shape) == 2 and shape[1] and shape[0] not in rows)
    return tokens * ACTIVATIONS * max(wide, default=0)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes over all ranks of one copy of a model."""

    weights: Mapping[str, int]
    """By encoding; ``""``: as stored."""
    cache: int
    """States that have a part for each slot, with the scratch slot, and what a head has not read; 0 without slots."""
    slots: int
    """The slots that are used, at most those that were traced."""
    states: int
    """Other states."""
    working: int
    processes: int
    stored: int
    """Bytes of the weights in the artifact; a swap of weights writes as many."""

    @property
    def fixed(self) -> int:
        """Everything but the cache."""
        return sum(self.weights.values()) + self.states + self.working + self.processes

    @property
    def total(self) -> int:
        return self.fixed + self.cache

    @property
    def per_slot(self) -> int:
        return self.cache // (self.slots + 1) if self.slots else 0

    def text(self) -> str:
        """Return the sum as text: ``1.2 GiB = weights 0.9 GiB (...) + cache 160.0 MiB (4 slots) + ...``."""
        kinds = ", ".join(f"{name or 'as stored'} {size(count)}" for name, count in self.weights.items())
        parts = [f"weights {size(sum(self.weights.values()))} ({kinds})"]
        if self.slots:
            parts.append(f"cache {size(self.cache)} ({self.slots} slots and a scratch slot of {size(self.per_slot)})")
        parts += [f"other states {size(self.states)}"] if self.states else []
        parts += [f"working memory {size(self.working)}", f"processes {size(self.processes)}"]
        return f"{size(self.total)} = {' + '.join(parts)}; a swap of weights writes {size(self.stored)} to TMPDIR"


def plan_memory(
    manifest: Manifest, slots: int | None = None, *, swaps: bool = False, draft: Manifest | None = None
) -> MemoryPlan:
    """Return the plan of an artifact of which ``slots`` are used, by default all that were traced. ``swaps``: its
    weights may be changed while it is served. ``draft``: a model beside it, which has the same slots."""
    backend = registry.get(manifest.backend)
    tp, traced = manifest.tp_degree, int(manifest.metadata.get("slots", 0)) if backend.lazy_states else 0
    used = traced if slots is None else min(slots, traced)
    rounded = {form.encoding: form for form in backend.quantizations.values()}
    weights: dict[str, int] = {}
    cache = states = stored = working = 0
    for stage in (manifest.of_rank(rank) for rank in range(0, manifest.world_size, tp)):
        for spec in stage.weights:
            form = rounded.get(spec.encoding)
            held = spec.nbytes if form is None else form.nbytes(spec.shape)
            weights[spec.encoding] = weights.get(spec.encoding, 0) + tp * held
            stored += tp * spec.nbytes
        for spec in stage.states:
            if traced and spec.shape[:1] == [traced + 1]:
                cache += tp * spec.nbytes // (traced + 1) * (used + 1)
            else:
                states += tp * spec.nbytes
        shapes = [(spec.shape, spec.nbytes) for spec in stage.weights]
        tokens = max(rows_of((spec.shape, spec.role) for spec in bucket.inputs) for bucket in manifest.buckets)
        working += tp * activation_bytes(tokens, shapes, manifest.metadata.get("vocab_size"), tp)
    exchanged = sum(spec.nbytes for bucket in manifest.buckets for spec in (*bucket.inputs, *bucket.outputs))
    processes = process_bytes(1 if backend.one_process else manifest.world_size) + CUTTING_BYTES * swaps
    working += 2 * exchanged
    if draft is not None:
        beside = plan_memory(draft, used)
        for encoding, count in beside.weights.items():
            weights[encoding] = weights.get(encoding, 0) + count
        cache, states, working = cache + beside.cache, states + beside.states, working + beside.working
        processes += beside.processes - process_bytes(0)
        if head := draft.metadata.get("head"):  # float32 states that it has not read, in the server's process
            cache += (used + 1) * int(draft.metadata["max_len"]) * head["features"] * 4
    return MemoryPlan(weights, cache, used, states, working, processes, stored)


def fit_slots(plans: Sequence[MemoryPlan], available: int, fraction: float) -> list[int]:
    """Return how many slots each copy of a model gets, so that all plans together stay within ``fraction`` of the
    ``available`` bytes: all of its own, or the same share of each. 0 for a model without slots.

    Raises MemoryBudgetError, with the sum, if not even one slot of each fits.
    """
    budget = int(available * fraction)
    left = budget - sum(plan.total if not plan.slots else plan.fixed for plan in plans)
    caches = sum(plan.cache for plan in plans)
    share = min(1.0, left / caches) if caches else 1.0
    slots = [min(plan.slots, int(share * (plan.slots + 1)) - 1) if plan.slots else 0 for plan in plans]
    if left < 0 or any(number < 1 for number, plan in zip(slots, plans, strict=True) if plan.slots):
        needs = sum(plan.fixed + 2 * plan.per_slot if plan.slots else plan.total for plan in plans)
        raise MemoryBudgetError(
            f"{size(needs)} are needed at least, with one slot of the cache and a scratch slot, and "
            f"{fraction:g} of the {size(available)} that are available is {size(budget)}; in full: "
            f"{'; '.join(plan.text() for plan in plans)}. Raise memory_fraction, trace with a smaller max_len or "
            "quantize the weights (nxd-infer trace --max-len, --quantize int8), or serve fewer replicas"
        )
    return slots
