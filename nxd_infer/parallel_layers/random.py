"""Random numbers over ranks: one stream that tensor-parallel ranks share, and one per rank.

Dropout on a replicated tensor must draw the same numbers on every rank, dropout on a split tensor different numbers.
The default generator is the shared stream; inside ``get_xla_rng_tracker().fork()`` it is the rank's own stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from hashlib import blake2b

import torch

from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.devices import (
    generator_states,
    keeping_generators,
    seed_accelerator,
    seed_generators,
    set_generator_states,
)

__all__ = ["RNGStatesTracker", "get_xla_rng_tracker", "model_parallel_xla_manual_seed"]

MODEL_PARALLEL_RNG = "model-parallel-rng"
_OWN_SEED_OFFSET = 2718
"""As in Megatron: large enough that no rank's own seed equals the shared seed."""


class RNGStatesTracker:
    """Named generator states of this process."""

    def __init__(self) -> None:
        self._states: dict[str, list[torch.Tensor]] = {}
        self._seeds: dict[str, int] = {}

    def reset(self) -> None:
        """Forget every stream."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, list[torch.Tensor]]:
        """Return a copy of the streams, for a checkpoint."""
        return {name: [state.clone() for state in states] for name, states in self._states.items()}

    def set_states(self, states: dict[str, list[torch.Tensor]]) -> None:
        self._states = {name: [state.clone() for state in kept] for name, kept in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Start a stream. Raises ParallelConfigError if the name is taken."""
        if name in self._states:
            raise ParallelConfigError(f"a random stream {name!r} already exists; reset() removes all streams")
        self._seeds[name] = seed
        self._start(name, seed)

    def _start(self, name: str, seed: int) -> None:
        with keeping_generators():
            seed_generators(seed)
            self._states[name] = generator_states()

    @contextlib.contextmanager
    def reseeded(self) -> Iterator[Callable[[str], None]]:
        """Inside the block, calls of the result start all streams from a text; afterwards they go on as before.

        Streams that differ, in this process or between ranks, start differently.
        """
        before = self.get_states()
        keys = {name: blake2b(bytes(states[0].tolist())).digest() for name, states in before.items()}

        def start(text: str) -> None:
            for name, key in keys.items():
                self._start(name, seed_of(text, key))

        try:
            yield start
        finally:
            self.set_states(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Inside the block, make the default generator the stream ``name``, continuing where it left off."""
        if name not in self._states:
            raise ParallelConfigError(
                f"there is no random stream {name!r}; call model_parallel_xla_manual_seed() or add() first"
            )
        with keeping_generators():
            state = self._states[name]
            set_generator_states(state)
            if len(state) < len(generator_states()) and name in self._seeds:  # CUDA has come up since the stream began
                seed_accelerator(self._seeds[name])
            try:
                yield
            finally:
                self._states[name] = generator_states()


def seed_of(text: str, key: bytes = b"") -> int:
    """Return a seed that depends on all of ``text`` and ``key``."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8, key=key).digest(), "big")


_tracker = RNGStatesTracker()


def get_xla_rng_tracker() -> RNGStatesTracker:
    """Return the tracker of this process."""
    return _tracker


def model_parallel_xla_manual_seed(seed: int, context: ParallelContext | None = None) -> None:
    """Seed both streams: the shared one with ``seed``, each tensor-parallel rank's own stream with a different seed."""
    context = current_context() if context is None else context
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(MODEL_PARALLEL_RNG, seed + _OWN_SEED_OFFSET + context.tp.rank)
