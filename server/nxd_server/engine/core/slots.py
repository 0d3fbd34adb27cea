"""Slots of the KV cache, each owned by one choice."""

from __future__ import annotations

import heapq


class SlotPool:
    """``count`` slots, numbered from 0; the lowest free slot is allocated first."""

    def __init__(self, count: int):
        if count < 1:
            raise ValueError(f"an engine needs at least one slot, got {count}")
        self.count = count
        self._free = list(range(count))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def allocate(self) -> int:
        """Return a free slot. Raises IndexError if there is none."""
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Free a slot. Raises KeyError if it is free already: a slot released twice would serve two requests."""
        self._used.remove(slot)
        heapq.heappush(self._free, slot)
