"""Errors of the server: what a caller did wrong, what is full, what is not there any more.

Each says which HTTP status it becomes in its docstring; the HTTP half maps by class and never by text.
"""

from __future__ import annotations

import logging

from nxd_infer.errors import ModelClosedError, ModelConfigError, NxdError, RankError


def summary(error: BaseException) -> str:
    """What a client is told of ``error``: the output of a rank is for the log alone, and so is what the holder of a
    model might do about ranks that are gone."""
    error = _itself(error)
    return error.summary if isinstance(error, RankError) else str(error)


def _itself(error: BaseException) -> BaseException:
    """What ended the ranks, where ``error`` is of a call that came later."""
    return error.__cause__ if isinstance(error, ModelClosedError) and error.__cause__ is not None else error


def log_failure(log: logging.Logger, what: str, error: BaseException) -> None:
    """One line for what is foreseen: a rank that ended or is late, files that do not fit. Its traceback, or that of the
    rank that raised it, with anything else."""
    error = _itself(error)
    if isinstance(error, RankError) and error.foreseen:
        log.error("%s: %s", what, error.summary)
    elif isinstance(error, (NxdError, ConnectionError)):
        log.error("%s: %s", what, error)
    else:
        log.error("%s", what, exc_info=error)


def forget_frames(error: BaseException) -> None:
    """Let go of what the frames of an error and its causes hold. An error of ranks that is kept would keep the ranks'
    channels and shared memory, and they the error, until the collector comes by."""
    links: list[BaseException | None] = [error]
    seen: set[int] = set()
    while links:
        link = links.pop()
        # They may go round: what ended the ranks is the cause of a call's refusal, and raised again while that is
        # handled its context is that refusal.
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]


class ServerError(NxdError):
    """Base of the errors that the engine and the HTTP half raise themselves."""


class SettingsError(NxdError, ValueError):
    """A setting that cannot be used; names the setting, never the value of a secret."""


class GenerateOnlyError(ServerError, ModelConfigError):
    """A setting that only artifacts which generate can have."""

    def __init__(self, name: str, task: str):
        super().__init__(f"{name}: the artifact's task is {task!r}, and only 'generate' has it")


class RequestError(ServerError, ValueError):
    """The request itself is wrong (400). ``field`` names the part of it, ``message`` says value, limit and fix."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


class BodyError(RequestError):
    """A request's body cannot be read at all (400); ``code`` says why, for a program."""

    def __init__(self, message: str, code: str):
        super().__init__("", message)
        self.code = code


class UnknownModelError(RequestError):
    """There is no such model or adapter (404, ``model_not_found``)."""

    def __init__(self, message: str):
        super().__init__("", message)


class AdapterConflictError(ServerError, RuntimeError):
    """An adapter's name is taken, or no slot for it is free (409)."""


class PromptTooLongError(RequestError):
    """A prompt over the model's maximum length (400, ``context_length_exceeded``)."""

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
    """More tokens were asked for than fit behind the prompt (400, ``context_length_exceeded``)."""

    def __init__(self, asked: int, prompt_tokens: int, max_len: int, field: str = "max_tokens"):
        self.room = max(1, max_len - prompt_tokens)
        super().__init__(
            field,
            f"{asked} tokens do not fit: this model's maximum context length is {max_len} tokens, and the prompt has "
            f"{prompt_tokens}, which leaves {self.room}. Ask for fewer, or shorten the prompt",
        )


class TextTooLongError(RequestError):
    """A text that must be over the model's maximum length, whatever its tokens (400, ``context_length_exceeded``)."""


class QueueFullError(ServerError):
    """Too many requests are waiting (429). ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailableError(ServerError, RuntimeError):
    """The engine takes no requests: starting, draining, recovering, failed or closed (503).

    ``state`` is the engine's state, ``retry_after`` seconds or None when waiting does not help.
    """

    def __init__(self, message: str, state: str = "", retry_after: float | None = None):
        super().__init__(message)
        self.state = state
        self.retry_after = retry_after


class EngineFailedError(EngineUnavailableError):
    """The ranks failed while this request was running or waiting (503); ``__cause__`` holds the rank's error."""


def ranks_failed(error: BaseException) -> EngineFailedError:
    """The error of a request that was in the ranks when ``error`` ended them."""
    failure = EngineFailedError(
        f"the ranks were lost while this request was in progress: {summary(error)}", "failed", 5.0
    )
    failure.__cause__ = error
    return failure


class ForbiddenPathError(ServerError, PermissionError):
    """A path that requests may not name: outside of the configured root, or there is none (403)."""


class WeightsBusyError(ServerError, RuntimeError):
    """The weights cannot be changed now: another change is on its way, or requests went on for too long (409)."""


def weights_busy() -> WeightsBusyError:
    """The error of a change that comes while another one is made."""
    return WeightsBusyError("another change of the weights is on its way; try again when it is over")


class DeadlineExceededError(ServerError, TimeoutError):
    """The request's own deadline passed before it was finished (504)."""


def not_finished(seconds: float) -> DeadlineExceededError:
    """The error of a request that took longer than the server allows any."""
    return DeadlineExceededError(f"the request was not finished after {seconds:g} s (request_timeout)")


def ended_early() -> EngineUnavailableError:
    """The error of a request that the server ended, because it goes down."""
    return EngineUnavailableError("the server ended the request before it was finished", "draining")


class GenerationError(ServerError, RuntimeError):
    """A step failed for this request alone (500); the others went on."""
