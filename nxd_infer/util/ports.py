"""Ports of this machine."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000
"""Below it are the numbers that services are known by."""
_TRIES = 100


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now, and is not one of those that the system gives to connections: one of
    them may be taken before the caller listens."""
    for port in random.SystemRandom().sample(range(_LOWEST, _first_given()), _TRIES):
        if _free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _first_given() -> int:
    """Return the lowest of the ports that the system chooses itself, by default 32768."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    return max(first, _LOWEST + _TRIES)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
