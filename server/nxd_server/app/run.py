"""``serve``: bind, start, answer, and shut down in order.

The port is bound before anything is loaded, so that a port in use is reported at once, and ``/livez`` answers while
the graphs are loaded and warmed up. SIGTERM or SIGINT stops admission (503), gives running requests ``drain_timeout``
seconds to finish, and exits with status 0; a second signal exits at once with status 1. If the ranks cannot be kept
alive, the server exits with status 1, so that its supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import NxdError
from nxd_infer.util.memory import keep_little
from nxd_server.api_keys import read_keys
from nxd_server.app.models import Models, plan
from nxd_server.http.certificate import Certificate, certificate_of
from nxd_server.http.listener import bind
from nxd_server.http.ops import logs
from nxd_server.http.ops.traces import Traces
from nxd_server.settings import ServerSettings, unknown_variables
from nxd_server.threads import in_thread

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger("nxd_server")

CLOSE_SECONDS = 8.0
FLUSH_SECONDS = 2.0
"""Minimum time for finished answers to reach their clients after the engine has ended; longest for the last spans."""


def serve(given: str | os.PathLike[str] | Sequence[str], settings: ServerSettings) -> int:
    """Serve an artifact, or what :func:`prepare` makes one of, or several, until a signal or a failure ends it.

    Returns the exit status.

    Logs instead of raising: an invalid setting or artifact, or a port in use, gives status 1 and one line.
    """
    logs.configure(settings.log_format, settings.log_level)
    try:
        return _serve([os.fspath(given)] if isinstance(given, str | os.PathLike) else given, settings)
    finally:
        logs.flush()


def _serve(given: Sequence[str], settings: ServerSettings) -> int:
    for line in unknown_variables(os.environ):
        logger.warning("%s", line)
    try:
        models = plan(given, settings)
    except (NxdError, OSError) as error:  # OSError: a directory that may not be read
        logger.error("%s", error)
        return 1
    except (KeyboardInterrupt, SystemExit):
        logger.warning(
            "stopped before %s could be served: what was not finished is removed, the next start makes it",
            " ".join(given),
        )
        raise
    if settings.prepare_only:
        logger.info("%s can be served", " ".join(str(model.args[0]) for model in models))
        return 0
    gc.disable()  # imported objects stay, so scanning them again and again only slows the start
    try:
        return serve_service(settings, lambda on_failure: Models([model(on_failure=on_failure) for model in models]))
    finally:
        gc.enable()


def serve_service(settings: ServerSettings, make_models: Callable[[Callable[[str], None]], Models]) -> int:
    """Like :func:`serve`, for services that ``make_models`` creates with the callback for their failure."""
    keep_little()
    # Texts are tokenized one at a time; the library would start a thread per core for them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        read_keys(settings)
        certificate = certificate_of(settings)
        traces = None if settings.otlp_traces_endpoint is None else Traces(settings.otlp_traces_endpoint)
        listener = bind(settings.host, settings.port, settings.connection_timeout)
    except NxdError as error:
        logger.error("%s", error)
        return 1
    with listener:
        return asyncio.run(_Run(settings, listener, certificate, traces).main(make_models))


class _Run:
    """One run of the server, from the first answer to the exit status."""

    def __init__(
        self, settings: ServerSettings, listener: socket.socket, certificate: Certificate | None, traces: Traces | None
    ):
        self._settings = settings
        self._listener = listener
        self._certificate, self._traces = certificate, traces
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._models: Models
        self._reload: Callable[[], None] = lambda: None
        """Reads again what may change while the server runs."""

    async def main(self, make_models: Callable[[Callable[[str], None]], Models]) -> int:
        """Serve until the end; return the exit status."""
        self._loop = asyncio.get_running_loop()
        self._models = models = make_models(self.on_failure)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._on_signal, number)
            if self._settings.api_keys_file is not None:
                self._loop.add_signal_handler(signal.SIGHUP, lambda: self._reload())
        models.start()  # the ranks import and load while this process imports the HTTP layer
        from nxd_server.http.server import make_server  # slow: uvicorn and FastAPI

        app, server = make_server(models, self._settings, self._certificate)
        self._reload, app.state.context.traces = app.state.context.keys.reload, self._traces
        gc.freeze()  # nor scan them during requests: a full collection took 30 ms
        gc.enable()
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        await asyncio.sleep(0)  # lets a failure that happened meanwhile arrive
        if not self._failed.is_set():
            logger.info("listening on http%s://%s:%d", "s" if self._certificate else "", shown, port)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        await _first(serving, self._stop, self._failed)
        graceful = not self._failed.is_set() and not serving.done()
        if graceful:
            await self._drain(app)
        await self._close(app)
        for connection in list(server.server_state.connections):
            _abandon(connection)
        server.should_exit = True
        await asyncio.wait({serving}, timeout=5.0)
        if self._traces is not None:
            await asyncio.wait({in_thread(self._traces.close, "nxd-traces")}, timeout=FLUSH_SECONDS)
        status = 0 if graceful and not self._hurry.is_set() else 1
        logger.info("ended with status %d", status)
        return status

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            logger.warning("%s again: ending at once", number.name)
            self._hurry.set()
            return
        logger.info("%s: no new requests; up to %g s for the others", number.name, self._settings.drain_timeout)
        self._models.begin_drain()
        self._stop.set()

    def on_failure(self, reason: str) -> None:
        """Record, from any thread, that the process should exit with a failure status."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._failed.set)

    async def _drain(self, app: FastAPI) -> None:
        timeout = self._settings.drain_timeout
        end = self._loop.time() + timeout
        draining = in_thread(lambda: self._models.drain(timeout), "nxd-end")
        await _first(draining, self._hurry, self._failed, timeout=timeout + 1.0)
        if draining.done() and draining.result():
            await self._flush(app, max(FLUSH_SECONDS, end - self._loop.time()))
        elif draining.done() and self._loop.time() >= end:  # before, the engine has failed
            logger.warning("requests were still running after %g s and are cut", timeout)

    async def _flush(self, app: FastAPI, seconds: float = FLUSH_SECONDS) -> None:
        """Wait until completed answers have been written; a request whose body is still arriving is not waited for."""
        for _ in range(int(seconds / 0.02)):
            if all(request.body_left for request in app.state.context.in_flight) or self._hurry.is_set():
                return
            await asyncio.sleep(0.02)

    async def _close(self, app: FastAPI) -> None:
        closing = in_thread(self._models.close, "nxd-end")
        await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
        if not closing.done():
            logger.error("the engine did not end within %g s and is left behind", CLOSE_SECONDS)
        elif (error := closing.exception()) is not None:
            logger.error("the engine did not end cleanly", exc_info=error)
        await self._flush(app)  # requests that were cut off receive their error


def _abandon(connection: Any) -> None:
    """Close a connection whose answer cannot be finished: its client sent half a request, or reads nothing."""
    cycle = getattr(connection, "cycle", None)
    if cycle is not None and not cycle.response_complete and connection.transport is not None:
        connection.transport.abort()


async def _first(task: asyncio.Future[Any], *events: asyncio.Event, timeout: float | None = None) -> None:
    """Wait until ``task`` is done, one of ``events`` is set, or ``timeout`` seconds have passed."""
    waiters = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait({task, *waiters}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiters:
            waiter.cancel()
