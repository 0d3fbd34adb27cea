"""What waits for an engine, in a fair order: the next one is of the account that was given the fewest tokens, and of an
account's own, that of the lowest priority, the oldest first.

Nobody saves up: who had nothing in the engine begins level with the account that was given the fewest of those that do.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from nxd_server.engine.admission import WholeRequest


class Waiting(Protocol):
    """A part of ``whole``, whose ``id`` is larger than those of what came earlier. ``cost``: the tokens of its prompt;
    ``work``: those that it is expected to take with its answer."""

    @property
    def id(self) -> int: ...
    @property
    def whole(self) -> WholeRequest: ...
    @property
    def cost(self) -> int: ...
    @property
    def work(self) -> float: ...


WaitingT = TypeVar("WaitingT", bound=Waiting)


def _place(item: Waiting) -> tuple[int, int]:
    return item.whole.priority, item.id


class FairQueue(Generic[WaitingT]):
    """Not thread-safe: used only by the engine's thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[WaitingT]] = {}
        """By account, in their order; no list is empty."""
        self._given: Counter[str] = Counter()
        """Tokens by account."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[WaitingT]:
        return (item for items in self._waiting.values() for item in items)

    def add(self, item: WaitingT, running: Iterable[WaitingT] = ()) -> None:
        """``running``: those in the engine that wait no more."""
        owner, active = item.whole.owner, {*self._waiting, *(other.whole.owner for other in running)}
        if active and owner not in active:
            self._given[owner] = max(self._given[owner], min(self._given[other] for other in active))
        bisect.insort(self._waiting.setdefault(owner, []), item, key=_place)

    def remove(self, item: WaitingT) -> bool:
        """Return whether it waited."""
        items = self._waiting.get(item.whole.owner, [])
        place = bisect.bisect_left(items, _place(item), key=_place)
        if place == len(items) or items[place] is not item:
            return False
        del items[place]
        if not items:
            del self._waiting[item.whole.owner]
        return True

    def charge(self, item: WaitingT, tokens: int) -> None:
        self._given[item.whole.owner] += tokens

    def in_order(self) -> Iterator[WaitingT]:
        """Yield what waits, each charged its cost when it begins; meanwhile nothing may be added or removed."""
        heads = [(self._given[owner], owner, 0) for owner in self._waiting]
        heapq.heapify(heads)
        while heads:
            given, owner, place = heads[0]
            item = self._waiting[owner][place]
            yield item
            if place + 1 < len(self._waiting[owner]):
                heapq.heapreplace(heads, (given + item.cost, owner, place + 1))
            else:
                heapq.heappop(heads)
