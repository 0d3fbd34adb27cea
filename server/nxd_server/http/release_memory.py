"""Return the memory of large bodies and texts to the system."""

from __future__ import annotations

import asyncio

from nxd_infer.util.memory import give_back
from nxd_server.threads import in_thread

TRIM_SECONDS = 2.0
_waiting: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}


def trim_soon() -> None:
    """Call ``malloc_trim`` once nobody has requested that for a while. Use from the event loop's thread only."""
    loop = asyncio.get_running_loop()
    if loop in _waiting:
        _waiting[loop].cancel()
    _waiting[loop] = loop.call_later(TRIM_SECONDS, _begin, loop)


def _begin(loop: asyncio.AbstractEventLoop) -> None:
    del _waiting[loop]
    in_thread(give_back, "nxd-trim")
