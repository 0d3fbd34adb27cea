"""The app in uvicorn."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from nxd_server.app.service import Service
from nxd_server.http.app import create_app
from nxd_server.http.connections import BACKLOG
from nxd_server.http.h11_protocol import guarded
from nxd_server.http.listener import WAITING
from nxd_server.settings import ServerSettings


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which would raise the signal again and make the exit status -15."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)  # uvicorn's ``backlog`` also sets how many are accepted at once

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(service: Service, settings: ServerSettings) -> tuple[FastAPI, Server]:
    """Return the app that answers for ``service``, and the server that runs it."""
    app = create_app(service, settings)
    config = uvicorn.Config(
        app,
        http=guarded(app.state.connections),
        backlog=BACKLOG,
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
