"""The middleware around every request: its id, its key, its log line, its metrics, and handling of all errors."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nxd_server.engine.admission import WholeRequest
from nxd_server.errors import forget_frames
from nxd_server.http.error_responses import ApiError, as_api_error
from nxd_server.http.ops.logs import log_access
from nxd_server.http.request_body import ClientLeft, DrainingReceive
from nxd_server.http.request_context import OPEN_PATHS, Context
from nxd_server.http.scope_keys import ARRIVED, CROWDED, REFUSAL, REQUEST_ID, WHOLE

logger = logging.getLogger("nxd_server.http")
ID_HEADER = b"x-request-id"
WEIGHTS_HEADER = b"x-weight-version"
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
CLIENT_CLOSED = 499
"""nginx's log status for a client that disconnected; it is never sent."""


class RequestMiddleware:
    """Pure ASGI, so that streams pass through untouched and handlers see a disconnect themselves."""

    def __init__(self, app: ASGIApp, context: Context):
        self._app, self._context = app, context
        self._access_log = context.settings.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        request_id = _request_id(scope)
        scope[REQUEST_ID], scope[ARRIVED] = request_id, begin
        whole = scope[WHOLE] = WholeRequest()
        status, sent, started = 0, 0, False

        body = DrainingReceive(receive, scope)

        async def count(message: Message) -> None:
            nonlocal status, sent, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                headers = [*message.get("headers", []), (ID_HEADER, request_id.encode())]
                if body.body_left and (b"connection", b"close") not in headers:  # the rest of the request is not read
                    headers.append((b"connection", b"close"))
                if whole.version is not None:
                    headers.append((WEIGHTS_HEADER, b"%d" % whole.version))
                message = {**message, "headers": headers}
            else:
                sent += len(message.get("body", b""))
            await send(message)

        self._context.in_flight.add(body)
        try:
            try:
                _check_framing(scope)
                if CROWDED in scope.get("state", ()) and scope["path"] not in OPEN_PATHS:
                    raise _crowded()
                self._context.keys.check(scope)
                await self._app(scope, body, count)
            except ClientLeft:
                status = CLIENT_CLOSED
            except Exception as error:
                refusal = scope[REFUSAL] = as_api_error(error, request_id)
                if refusal.status == 500 and refusal.code == "internal_error":
                    logger.exception("request %s failed", request_id)
                if started:
                    raise  # closes the connection, so that the client sees an incomplete answer
                forget_frames(error)  # breaks a cycle: the scope holds the error, its frames the scope and the body
                await body.drain()
                await refusal.response()(scope, receive, count)
        except ClientLeft:
            status = CLIENT_CLOSED
        finally:
            whole.close()
            self._context.in_flight.discard(body)
            seconds = time.monotonic() - begin
            # The route's template, so that a scanner cannot fill the metrics with paths.
            route = getattr(scope.get("route"), "path", None) or "unmatched"
            self._context.metrics.http(scope["method"], route, status, seconds)
            probe = scope["path"] in OPEN_PATHS and status in (200, 503)  # some client polls every second
            if self._access_log and not probe:
                log_access(scope, status, seconds, sent)


def _check_framing(scope: Scope) -> None:
    """Raise ApiError 400 for a request with two lengths: a proxy may have used the other one to find its end."""
    names = [name for name, _ in scope["headers"]]
    if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] != "1.1"):
        raise ApiError(
            400,
            "a request has Content-Length or Transfer-Encoding (only in HTTP/1.1), not both",
            code="invalid_http",
            headers={"connection": "close"},
        )


def _crowded() -> ApiError:
    return ApiError(
        503,
        "the server has reached its limit of connections (max_connections), and all of them are being answered",
        code="too_many_connections",
        retry_after=1,
        headers={"connection": "close"},
    )


def _request_id(scope: Scope) -> str:
    """Return the client's own id if it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == ID_HEADER and _SAFE_ID.fullmatch(value):
            return value.decode("ascii")
    return f"req-{uuid.uuid4().hex}"
