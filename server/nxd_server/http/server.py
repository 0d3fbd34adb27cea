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
from nxd_server.http.certificate import Certificate
from nxd_server.http.listener import WAITING
from nxd_server.http.protocol import limited
from nxd_server.settings import ServerSettings

BACKLOG = 8
"""Connections accepted per turn of the event loop; with more, many would be open before the first is counted."""
MOST_HEAD_BYTES = 2**14
TICKS = 10
"""Of uvicorn, between two looks at the certificate: a second."""


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which would raise the signal again and make the exit status -15."""

    certificate: Certificate | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)  # uvicorn's ``backlog`` also sets how many are accepted at once

    async def on_tick(self, counter: int) -> bool:
        if self.certificate is not None and counter % TICKS == 0:
            self.certificate.refresh()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(models: Models, settings: ServerSettings, certificate: Certificate | None) -> tuple[FastAPI, Server]:
    """Return the app that answers for ``models``, and the server that runs it, with TLS if it has a certificate."""
    app = create_app(models, settings)
    # By default any process of this machine may say who it asks for.
    proxies = settings.forwarded_allow_ips or os.environ.get("FORWARDED_ALLOW_IPS")
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
        proxy_headers=proxies is not None,
        forwarded_allow_ips=proxies,
        timeout_keep_alive=settings.connection_timeout,
        timeout_graceful_shutdown=2,
    )
    server = Server(config)
    if certificate is not None:
        config.load()
        config.ssl, server.certificate = certificate.context, certificate
    return app, server
