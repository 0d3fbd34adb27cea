"""Error responses in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``, one status per kind.

400 the request is wrong, 401 no valid key, 403 not allowed, 404 no such route or model, 405 wrong method, 409 in
conflict with an operation of the server, 413 body too large, 415 body compressed or no JSON, 429 full (with
``Retry-After``), 503 not ready or failed (with ``Retry-After``), 504 the deadline passed. 422 is never used. 500 means
a defect of ours: its message holds only the request id, and the log has the details.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from starlette.responses import Response

from nxd_infer.errors import InputMismatchError, InputRangeError, ModelClosedError, RankError
from nxd_infer.util.suggest import did_you_mean
from nxd_server.errors import ServerError, summary

STATUSES = {
    400: ("invalid_request_error", "invalid_request", "invalid_request_error"),
    401: ("authentication_error", "invalid_api_key", "authentication_error"),
    403: ("permission_error", "forbidden", "permission_error"),
    404: ("not_found_error", "not_found", "not_found_error"),
    405: ("invalid_request_error", "method_not_allowed", "invalid_request_error"),
    409: ("conflict_error", "conflict", "invalid_request_error"),
    413: ("invalid_request_error", "body_too_large", "request_too_large"),
    415: ("invalid_request_error", "compressed_body", "invalid_request_error"),
    429: ("rate_limit_error", "queue_full", "rate_limit_error"),
    500: ("server_error", "internal_error", "api_error"),
    503: ("service_unavailable_error", "service_unavailable", "overloaded_error"),
    504: ("timeout_error", "timeout", "timeout_error"),
}
"""Type of an error, its code if it has none of its own, and its type in Anthropic's API, by status."""
NO_THREADS = "thread_unsupported_request"
"""The code by which Anthropic's client knows that it must send whole conversations."""


class ApiError(Exception):
    """An error to be sent to the client.

    Args:
        status: one of :data:`STATUSES`.
        message: for people: the value, the limit, the fix.
        param: the wrong field of the body, as a path (``messages[0].role``).
        code: for programs; by default that of the status.
        retry_after: seconds; sent as ``Retry-After``.
        headers: additional response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.type, own_code, self._anthropic_type = STATUSES[status]
        self.code = code or own_code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    def naming(self, fields: Mapping[str, str] | None) -> ApiError:
        """Name the client's fields, if those at fault have other names: ``fields``, from each path to its own."""
        path = self.param or ""
        found = max((name for name in fields or () if _begins(path, name)), key=len, default="")
        if fields and found:
            self.param = fields[found] + path[len(found) :]
            self.message = self.message.replace(path, self.param, 1)
        return self

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """Return the error in the form of Anthropic's API."""
        error: dict[str, Any] = {"type": self._anthropic_type, "message": self.message}
        if self.code == NO_THREADS:
            error["details"] = {"error_code": self.code, "unsupported": [self.param]}
        return {"type": "error", "error": error, "request_id": request_id}

    def tgi_body(self) -> dict[str, Any]:
        """Return the error in the form of Hugging Face's text-generation-inference."""
        kind = {429: "overloaded"}.get(self.status, "generation" if self.status >= 500 else "validation")
        return {"error": self.message, "error_type": kind}

    def response(self, body: dict[str, Any] | None = None) -> Response:
        return Response(encode(body or self.body()), self.status, self.headers, "application/json")


def _begins(path: str, name: str) -> bool:
    return path.startswith(name) and path[len(name) : len(name) + 1] in ("", ".", "[")


def encode(value: Any) -> bytes:
    """Return compact UTF-8 JSON. Escapes a lone surrogate in a message instead of failing."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def clip(name: str) -> str:
    """Return a name chosen by the client, shortened and printable."""
    name = name.encode("utf-8", "backslashreplace").decode()
    return name if len(name) <= 100 else name[:97] + "..."


def unknown_field(path: str, known: Iterable[str] = ()) -> ApiError:
    """``known``: the possible names for the last part of ``path``."""
    hint = did_you_mean(path.rpartition(".")[2], known)
    return bad_request(f"unknown field `{path}`{hint}", path, "unknown_parameter")


def check_fields(given: dict[str, Any], known: Collection[str], where: str) -> None:
    """Raise ApiError 400 for a field of ``given`` that is not null and not ``known``."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise unknown_field(f"{where}.{clip(name)}", known)


def wrong(path: str, problem: str) -> ApiError:
    return bad_request(f"`{path}` {problem}", path)


def missing_field(path: str) -> ApiError:
    return bad_request(f"`{path}` is required", path, "missing_parameter")


def unsupported(param: str, why: str = "") -> ApiError:
    """Return the 400 for a field that would change the answer but is not implemented by this server."""
    message = f"`{param}` is not supported by this server" + (f": {why}" if why else "")
    return ApiError(400, message, param=param, code="unsupported_parameter")


def as_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """Return the response that ``error`` means to a client; 500 for an unexpected error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServerError):
        retry_after = error.retry_after or (1 if error.status == 503 else None)
        return ApiError(error.status, str(error), param=error.field or None, code=error.code, retry_after=retry_after)
    if isinstance(error, InputMismatchError):
        name = f"inputs.{error.input}" if isinstance(error, InputRangeError) else "inputs"
        return ApiError(400, str(error), param=name, code="invalid_value")
    if isinstance(error, RankError):
        return ApiError(503, f"the model's ranks failed: {summary(error)}", code="rank_failed", retry_after=5)
    if isinstance(error, ModelClosedError):
        return ApiError(503, str(error), code="not_ready", retry_after=1)
    return ApiError(500, f"internal error; the server's log has it under request id {request_id}")
