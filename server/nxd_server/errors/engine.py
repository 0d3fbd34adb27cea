"""Errors of the engine: full, unavailable, failed, or too late for this request."""

from __future__ import annotations

from nxd_server.errors.base import ServerError
from nxd_server.errors.reporting import summary


class QueueFullError(ServerError):
    """Too many requests are waiting (429). ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailableError(ServerError, RuntimeError):
    """The engine accepts no requests: starting, draining, recovering, failed or closed (503).

    ``state`` is the engine's state, ``retry_after`` seconds or None when waiting does not help.
    """

    def __init__(self, message: str, state: str = "", retry_after: float | None = None):
        super().__init__(message)
        self.state = state
        self.retry_after = retry_after


class EngineFailedError(EngineUnavailableError):
    """The ranks failed while this request was running or queued (503); ``__cause__`` holds the rank's error."""


def ranks_failed(error: BaseException) -> EngineFailedError:
    """Return the error of a request that was running when ``error`` ended the ranks."""
    failure = EngineFailedError(
        f"the ranks were lost while this request was in progress: {summary(error)}", "failed", 5.0
    )
    failure.__cause__ = error
    return failure


class DeadlineExceededError(ServerError, TimeoutError):
    """The request's own deadline passed before it finished (504)."""


DEADLINE_GRACE = 0.5
"""The engine ends an overdue request itself; after this many seconds, if its thread is stuck, who waits for it does."""


def not_finished(seconds: float) -> DeadlineExceededError:
    """Return the error of a request that exceeded the server's time limit."""
    return DeadlineExceededError(f"the request was not finished after {seconds:g} s (request_timeout)")


def ended_early() -> EngineUnavailableError:
    """Return the error of a request that the server ended because it is shutting down."""
    return EngineUnavailableError("the server ended the request before it was finished", "draining")


class GenerationError(ServerError, RuntimeError):
    """A step failed for this request only (500); the others continued."""
