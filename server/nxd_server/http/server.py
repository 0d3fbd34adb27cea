"""The app in uvicorn."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from nxd_server.app.models import Models
from nxd_server.http.app import create_app
from nxd_server.http.listener import WAITING
from nxd_server.http.protocol import limited
from nxd_server.settings import ServerSettings

BACKLOG = 8
"""Connections accepted per turn of the event loop; with more, many would be open before the first is counted."""
MOST_HEAD_BYTES = 2**14


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which would raise the signal again and make the exit status -15."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)  # uvicorn's ``backlog`` also sets how many are accepted at once

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(models: Models, settings: ServerSettings) -> tuple[FastAPI, Server]:
    """Return the app that answers for ``models``, and the server that runs it."""
    app = create_app(models, settings)
    config = uvicorn.Config(
        app,
        http=limited(app.state.context.connections),
        backlog=BACKLOG,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # By default any process of this machine may say who it asks for.
        proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
        timeout_keep_alive=settings.connection_timeout,
        timeout_graceful_shutdown=2,
    )
    return app, Server(config)
