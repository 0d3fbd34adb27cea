"""The server's listening socket, bound before anything slow is imported."""

from __future__ import annotations

import errno
import socket

from nxd_server.errors import SettingsError

WAITING = 2048
"""Backlog of connections that the system holds until they are accepted."""


def bind(host: str, port: int, unread_seconds: float) -> socket.socket:
    """Return a listening socket. Raises SettingsError that says what is wrong with the address.

    The system ends a connection whose client has taken nothing of what was sent to it for ``unread_seconds``.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        raise SettingsError(f"cannot listen on {host!r}: {getattr(error, 'strerror', None) or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; its connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unread_seconds))
        listener.bind(address)
        listener.listen(WAITING)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        way_out = {
            errno.EADDRINUSE: "stop what uses the port, or choose another one with --port",
            errno.EADDRNOTAVAIL: "choose an address of this machine with --host, or 0.0.0.0 for all of them",
            errno.EACCES: "choose a port with --port that needs no more rights, such as 8000",
        }.get(error.errno or 0, "choose others with --host and --port")
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}; {way_out}") from None
    return listener
