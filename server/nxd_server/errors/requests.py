"""Errors of one request: wrong, forbidden, or in conflict with what goes on."""

from __future__ import annotations

from nxd_server.errors.base import ServerError


class RequestError(ServerError, ValueError):
    """The request itself is wrong (400). ``field`` names the faulty part; the message states value, limit and fix."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


class BodyError(RequestError):
    """A request's body cannot be read at all (400); ``code`` is the reason, for programs."""

    def __init__(self, message: str, code: str):
        super().__init__("", message)
        self.code = code


class UnknownModelError(RequestError):
    """There is no such model or adapter (404, ``model_not_found``)."""

    def __init__(self, message: str):
        super().__init__("", message)


class ForbiddenPathError(ServerError, PermissionError):
    """A path that requests may not name: it is outside the configured root, or no root is configured (403)."""


class AdapterConflictError(ServerError, RuntimeError):
    """An adapter's name is taken, or no slot is free for it (409)."""


class WeightsBusyError(ServerError, RuntimeError):
    """The weights cannot be changed now: another change is in progress, or requests ran for too long (409)."""


def weights_busy() -> WeightsBusyError:
    """Return the error of a change that arrives while another one is in progress."""
    return WeightsBusyError("another change of the weights is on its way; try again when it is over")
