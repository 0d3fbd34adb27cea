"""Ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(10_000, 32_768)
"""Between those that services are known by and those that the system gives to connections: one of these may be taken
before the caller listens."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now. Raises OSError if a hundred of them are taken."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port of 127.0.0.1 is free")
