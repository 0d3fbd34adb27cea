"""Errors of the server, and what is said of one: to a client, to the log, and to the garbage collector."""

from __future__ import annotations

import logging

from nxd_infer.errors import ModelClosedError, ModelConfigError, NxdError, RankError

DEADLINE_GRACE = 0.5
"""The engine ends an overdue request itself; after this many seconds, if its thread is stuck, who waits for it does."""


class ServerError(NxdError):
    """Base class of the errors that the engine and the HTTP layer raise themselves, and what a response says of one."""

    status = 500
    code: str | None = None
    """For programs; None: that of the status."""
    field: str | None = None
    """The faulty part of the request."""
    retry_after: float | None = None
    """Seconds; None when waiting does not help."""


class SettingsError(NxdError, ValueError):
    """A setting has an invalid value; names the setting, never the value of a secret."""


class TokenizerMismatchError(ServerError, ModelConfigError):
    """An artifact's tokenizer gives other ids here than where the model was traced, or that cannot be checked."""


class GenerateOnlyError(ServerError, ModelConfigError):
    """A setting that applies only to artifacts that generate text."""

    def __init__(self, name: str, task: str):
        super().__init__(f"{name}: the artifact's task is {task!r}, and only 'generate' has it")


# --- one request: wrong, forbidden, or in conflict with what goes on ---


class RequestError(ServerError, ValueError):
    """The request itself is wrong. ``field`` names the faulty part; the message states value, limit and fix."""

    status, code = 400, "invalid_value"

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


class BodyError(RequestError):
    """A request's body cannot be read at all; ``code`` is the reason."""

    def __init__(self, message: str, code: str):
        super().__init__("", message)
        self.code = code


class UnknownModelError(RequestError):
    """There is no such model or adapter."""

    status, code = 404, "model_not_found"

    def __init__(self, message: str):
        super().__init__("", message)
        self.field = "model"


class ForbiddenPathError(ServerError, PermissionError):
    """A path that requests may not name: it is outside the configured root, or no root is configured."""

    status, code, field = 403, "forbidden_path", "path"


class AdapterConflictError(ServerError, RuntimeError):
    """An adapter's name is taken, or no slot is free for it."""

    status, code = 409, "adapter_conflict"


class WeightsBusyError(ServerError, RuntimeError):
    """The weights cannot be changed now: another change is in progress, or requests ran for too long."""

    status, code, retry_after = 409, "weights_busy", 5.0

    def __init__(self, message: str = "another change of weights, adapters or ranks is on its way; try again later"):
        super().__init__(message)


# --- too long for the model ---


class PromptTooLongError(RequestError):
    """A prompt over the model's maximum length."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_len: int, field: str = "prompt", *, completes: bool = True):
        what, together, fix = "text", "", "--prompt-buckets, where it takes more, or ask for truncate_prompt_tokens"
        if completes:
            what, together, fix = "prompt", ", prompt and completion together", "--max-len"
        super().__init__(
            field,
            f"the {what} has {prompt_tokens} tokens; this model's maximum context length is {max_len} tokens"
            f"{together}. Shorten the {what}, or trace the model again with a larger {fix}",
        )
        self.prompt_tokens = prompt_tokens
        self.max_len = max_len


class MaxTokensError(RequestError):
    """More tokens were requested than fit after the prompt."""

    code = "context_length_exceeded"

    def __init__(self, requested: int, prompt_tokens: int, max_len: int, field: str = "max_tokens"):
        self.room = max(1, max_len - prompt_tokens)
        super().__init__(
            field,
            f"{requested} tokens do not fit: this model's maximum context length is {max_len} tokens, and the prompt "
            f"has {prompt_tokens}, which leaves {self.room}. Ask for fewer, or shorten the prompt",
        )


class TextTooLongError(RequestError):
    """A text so long that it must exceed the model's maximum length, however it is tokenized."""

    code = "context_length_exceeded"


# --- the engine: full, unavailable, failed, or too late for this request ---


class QueueFullError(ServerError):
    """Too much is waiting, or it would take too long."""

    status = 429

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class RateLimitError(QueueFullError):
    """The holder of a key has used what the key's limits allow."""

    code = "rate_limit_exceeded"


class EngineUnavailableError(ServerError, RuntimeError):
    """The engine accepts no requests: ``state`` is starting, draining, recovering, failed or closed."""

    status = 503

    def __init__(self, message: str, state: str = "", retry_after: float | None = None):
        super().__init__(message)
        self.state = state
        self.code = state or "not_ready"
        self.retry_after = retry_after


class EngineFailedError(EngineUnavailableError):
    """The ranks failed while this request was running or queued; ``__cause__`` holds the rank's error."""

    def __init__(self, error: BaseException):
        words = f"the ranks were lost while this request was in progress: {summary(error)}"
        super().__init__(words, "failed", 5.0)
        self.code = "engine_failed"
        self.__cause__ = error


class DeadlineExceededError(ServerError, TimeoutError):
    """The request's own deadline passed before it finished."""

    status = 504


def not_finished(seconds: float) -> DeadlineExceededError:
    """Return the error of a request that exceeded the server's time limit."""
    return DeadlineExceededError(f"the request was not finished after {seconds:g} s (request_timeout)")


def ended_early() -> EngineUnavailableError:
    """Return the error of a request that the server ended because it is shutting down."""
    return EngineUnavailableError("the server ended the request before it was finished", "draining")


class GenerationError(ServerError, RuntimeError):
    """A step failed for this request only; the others continued."""

    code = "generation_failed"


# --- what is said of an error ---


def summary(error: BaseException) -> str:
    """Return the text of ``error`` for a client. A rank's output is for the log only, and so is the advice to the
    caller of a model whose ranks are lost."""
    error = _itself(error)
    return error.summary if isinstance(error, RankError) else str(error)


def _itself(error: BaseException) -> BaseException:
    """Return the error that ended the ranks, if ``error`` comes from a later call."""
    return error.__cause__ if isinstance(error, ModelClosedError) and error.__cause__ is not None else error


def log_failure(log: logging.Logger, what: str, error: BaseException) -> None:
    """Log an expected error (a rank that ended or is late, files that do not match) in one line, and any other with its
    traceback or that of the rank that raised it."""
    error = _itself(error)
    if isinstance(error, RankError) and error.foreseen:
        log.error("%s: %s", what, error.summary)
    elif isinstance(error, (NxdError, ConnectionError)):
        log.error("%s: %s", what, error)
    else:
        log.error("%s", what, exc_info=error)


def forget_frames(error: BaseException) -> None:
    """Drop the references in the traceback frames of an error and its causes. A stored rank error would otherwise
    keep the ranks' channels and shared memory alive, in a reference cycle, until the garbage collector runs."""
    links: list[BaseException | None] = [error]
    seen: set[int] = set()
    while links:
        link = links.pop()
        # The links may form a cycle: the error that ended the ranks is the cause of a later call's error, and when it
        # is raised again while that one is being handled, that one becomes its context.
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
