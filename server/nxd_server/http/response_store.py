"""The responses that the server keeps for later requests, in memory and within bounds; each key has its own."""

from __future__ import annotations

import json
from typing import Any

from nxd_server.http.error_responses import encode


class ResponseStore:
    """Holds responses with the items that they answer. Used only by the event loop's thread."""

    def __init__(self, most: int, most_bytes: int):
        """``most``: responses; ``most_bytes``: of all of them, as JSON."""
        self._most, self._most_bytes = most, most_bytes
        self._kept: dict[bytes, dict[str, tuple[bytes, list[str]]]] = {}
        """The JSON of each and the ids of its items, by the key's owner, the oldest first."""
        self._items: dict[tuple[bytes, str], str] = {}
        """Where an item is, by owner and id."""
        self._bytes: dict[bytes, int] = {}

    @property
    def keeps(self) -> bool:
        return self._most > 0 and self._most_bytes > 0

    def put(self, owner: bytes, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response; ``items``: all that it answers."""
        data = encode({"response": response, "items": items})
        if not self.keeps or len(data) > self._most_bytes:
            return
        ids = [item["id"] for item in (*items, *response["output"])]
        self._kept.setdefault(owner, {})[response["id"]] = data, ids
        self._bytes[owner] = self._bytes.get(owner, 0) + len(data)
        self._items |= {(owner, item): response["id"] for item in ids}
        while sum(map(len, self._kept.values())) > self._most or sum(self._bytes.values()) > self._most_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self.remove(largest, next(iter(self._kept[largest])))

    def get(self, owner: bytes, id: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """Return a response and the items that it answers."""
        kept = self._kept.get(owner, {}).get(id)
        if kept is None:
            return None
        found = json.loads(kept[0])
        return found["response"], found["items"]

    def item(self, owner: bytes, id: str) -> dict[str, Any] | None:
        """Return an item of a stored response."""
        found = self.get(owner, self._items.get((owner, id), ""))
        return next((one for one in (*found[1], *found[0]["output"]) if one["id"] == id), None) if found else None

    def remove(self, owner: bytes, id: str) -> bool:
        """Forget a response; False if there is none."""
        kept = self._kept.get(owner, {}).pop(id, None)
        if kept is None:
            return False
        data, ids = kept
        self._bytes[owner] -= len(data)
        if not self._kept[owner]:
            del self._kept[owner], self._bytes[owner]
        for item in ids:
            if self._items.get((owner, item)) == id:
                del self._items[owner, item]
        return True
