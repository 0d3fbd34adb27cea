"""Errors of the server: a wrong request, a full queue, a missing or unavailable resource.

Each docstring states the HTTP status; the HTTP layer maps by class, never by message text.
"""

from nxd_server.errors.base import (
    GenerateOnlyError,
    ServerError,
    SettingsError,
)
from nxd_server.errors.context_length import (
    MaxTokensError,
    PromptTooLongError,
    TextTooLongError,
)
from nxd_server.errors.engine import (
    DEADLINE_GRACE,
    DeadlineExceededError,
    EngineFailedError,
    EngineUnavailableError,
    GenerationError,
    QueueFullError,
    ended_early,
    not_finished,
    ranks_failed,
)
from nxd_server.errors.reporting import (
    forget_frames,
    log_failure,
    summary,
)
from nxd_server.errors.requests import (
    AdapterConflictError,
    BodyError,
    ForbiddenPathError,
    RequestError,
    UnknownModelError,
    WeightsBusyError,
    weights_busy,
)

__all__ = [
    "DEADLINE_GRACE",
    "AdapterConflictError",
    "BodyError",
    "DeadlineExceededError",
    "EngineFailedError",
    "EngineUnavailableError",
    "ForbiddenPathError",
    "GenerateOnlyError",
    "GenerationError",
    "MaxTokensError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "ServerError",
    "SettingsError",
    "TextTooLongError",
    "UnknownModelError",
    "WeightsBusyError",
    "ended_early",
    "forget_frames",
    "log_failure",
    "not_finished",
    "ranks_failed",
    "summary",
    "weights_busy",
]
