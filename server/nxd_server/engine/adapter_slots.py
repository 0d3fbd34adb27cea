"""The LoRA adapters of an engine: which adapter is in which slot of the model, and how many choices use it."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nxd_infer.errors import AdapterError, WeightSchemaError
from nxd_infer.runtime.rank_model import RankModel
from nxd_server.errors import AdapterConflictError, RequestError, UnknownModelError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


@dataclass(eq=False)
class Adapter:
    """One adapter, from the reservation of its slot until the slot is free again."""

    name: str
    slot: int
    created: int
    """Seconds since 1970."""
    running: int = 0
    """Number of choices that use it, including waiting ones."""
    ready: bool = False
    """Whether new requests may name it."""


class Adapters:
    """The adapter slots of one model. Thread-safe."""

    def __init__(self, model: RankModel, put: Callable[[int, str | os.PathLike[str], float], None]):
        """``put(slot, folder, timeout)`` loads an adapter into a slot of ``model``."""
        self._put = put
        self.slots = int((model.manifest.metadata.get("lora") or {}).get("slots", 0))
        self.taken_names: Collection[str] = ()
        """The model's own names, which no adapter may have."""
        self._lock = threading.Lock()
        self._held: list[Adapter] = []
        """Adapters that occupy a slot: ready, being loaded, or removed while requests still use them."""

    def listed(self) -> list[Adapter]:
        """Return the adapters that requests may name, oldest first."""
        with self._lock:
            return [adapter for adapter in self._held if adapter.ready]

    def load(self, name: str, folder: str | os.PathLike[str], timeout: float = 60.0) -> Adapter:
        """Load the adapter of a PEFT directory into a free slot while serving. Returns when it can be used.

        Raises RequestError if it does not fit the model, AdapterConflictError if the name is taken or no slot is free,
        WeightsBusyError if another load or swap, or the running step, takes longer than ``timeout`` seconds, and
        ArtifactSpaceError if the disk is full. An error changes nothing.
        """
        adapter = self._reserve(name)
        try:
            self._put(adapter.slot, folder, timeout)
        except BaseException as error:
            with self._lock:
                self._held.remove(adapter)
            if isinstance(error, (AdapterError, WeightSchemaError)):
                raise RequestError("path", str(error)) from error
            raise
        with self._lock:
            adapter.ready = True
        return adapter

    def check(self, name: str) -> None:
        """Raise what :meth:`load` raises at once for this name."""
        with self._lock:
            self._free(name)

    def _reserve(self, name: str) -> Adapter:
        with self._lock:
            adapter = Adapter(name, self._free(name), int(time.time()))
            self._held.append(adapter)
            return adapter

    def _free(self, name: str) -> int:
        """Return a free slot."""
        if not self.slots:
            raise RequestError("", "this model was traced without slots for adapters: trace it again with --lora-slots")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise RequestError(
                "name",
                f"must be 1 to 128 letters, digits and . _ : / -, beginning with a letter or digit, got {name!r}",
            )
        if name in self.taken_names:
            raise AdapterConflictError(f"{name!r} is the name of the model itself: choose another one")
        # A removed adapter's name may be reused while its last requests are still running.
        if any(adapter.name == name and (adapter.ready or not adapter.running) for adapter in self._held):
            raise AdapterConflictError(f"there is an adapter {name!r} already: remove it, or choose another name")
        taken = {adapter.slot for adapter in self._held}
        free = [slot for slot in range(1, self.slots + 1) if slot not in taken]
        if not free:
            held = ", ".join(f"{adapter.name} ({adapter.running} running)" for adapter in self._held)
            raise AdapterConflictError(
                f"all {self.slots} slots for adapters are in use by {held}: remove one, wait until the requests of "
                "a removed one have ended, or trace the model with more --lora-slots"
            )
        return free[0]

    def remove(self, name: str) -> Adapter:
        """Withdraw ``name`` from new requests. Its slot is free once the running ones have ended.

        Raises UnknownModelError if there is no such adapter.
        """
        with self._lock:
            adapter = self._find(name)
            adapter.ready = False
            if not adapter.running:
                self._held.remove(adapter)
            return adapter

    def take(self, name: str, choices: int) -> Adapter:
        """Return the adapter for ``choices`` new choices, each to be given back later. Raises UnknownModelError."""
        with self._lock:
            adapter = self._find(name)
            adapter.running += choices
            return adapter

    def give_back(self, adapter: Adapter) -> None:
        """Release the adapter for a choice that has ended."""
        with self._lock:
            adapter.running -= 1
            if not adapter.running and not adapter.ready:
                self._held.remove(adapter)

    def _find(self, name: str) -> Adapter:
        for adapter in self._held:
            if adapter.name == name and adapter.ready:
                return adapter
        names = ", ".join(adapter.name for adapter in self._held if adapter.ready)
        raise UnknownModelError(f"there is no adapter {name!r}; {f'there are {names}' if names else 'there is none'}")
