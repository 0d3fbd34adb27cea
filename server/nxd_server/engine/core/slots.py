"""Slots of the KV cache, each owned by one choice. A free slot keeps what its last owner has written, so that a prompt
that begins with the same tokens need not compute them again (prefix caching)."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

FEWEST_REUSED = 16
"""A prompt that shares fewer tokens with a slot does not seek it: the slot that was free for the longest time may hold
as many, and what is overwritten is worth less."""


@dataclass(frozen=True)
class _Kept:
    """What a free slot holds: the keys and values of ``tokens``, from position 0 on."""

    key: Hashable
    tokens: np.ndarray
    released: int
    """Larger for slots that were released later."""

    def shared(self, key: Hashable, prompt: np.ndarray) -> int:
        """Return how many tokens at the start of ``prompt`` are held."""
        if key != self.key:
            return 0
        most = min(len(prompt), len(self.tokens))
        differs = self.tokens[:most] != prompt[:most]
        return int(differs.argmax()) if differs.any() else most


_EMPTY = _Kept(None, np.empty(0, np.int64), 0)


class SlotPool:
    """``count`` slots, numbered from 0."""

    def __init__(self, count: int):
        if count < 1:
            raise ValueError(f"an engine needs at least one slot, got {count}")
        self.count = count
        self._free = dict.fromkeys(range(count), _EMPTY)
        self._used: set[int] = set()
        self._turns = itertools.count(1)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def allocate(self, prompt: Tokens[int] = (), key: Hashable = None) -> tuple[int, int]:
        """Return a free slot, and how many tokens at the start of ``prompt`` it holds, computed under the same ``key``;
        always fewer than all, since the last one gives the answer's first token.

        It is the slot that holds most of them, if most of its tokens are among them: else less would be gained than is
        overwritten. Otherwise it is the one that was free for the longest time. Raises IndexError if there is none.
        """
        if not self._free:
            raise IndexError("no slot is free")
        wanted = np.asarray(prompt[:-1], np.int64)
        shared = {slot: kept.shared(key, wanted) for slot, kept in self._free.items()}
        slot = max(shared, key=lambda slot: (shared[slot], self._free[slot].released))
        if shared[slot] < max(FEWEST_REUSED, len(self._free[slot].tokens) / 2):
            slot = min(shared, key=lambda slot: (self._free[slot].released, slot))
        del self._free[slot]
        self._used.add(slot)
        return slot, shared[slot]

    def release(self, slot: int, tokens: Tokens[int] = (), key: Hashable = None) -> None:
        """Free a slot, which holds the keys and values of ``tokens``, computed under ``key``.

        Raises KeyError if it is free already: a slot released twice would serve two requests.
        """
        self._used.remove(slot)
        kept = _Kept(key, np.asarray(tokens, np.int64), next(self._turns)) if len(tokens) else _EMPTY
        self._free[slot] = kept

    def forget(self) -> None:
        """Record that the free slots hold nothing that is known."""
        self._free = dict.fromkeys(sorted(self._free), _EMPTY)
