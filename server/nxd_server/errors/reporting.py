"""What is said of an error: to a client, to the log, and to the garbage collector."""

from __future__ import annotations

import logging

from nxd_infer.errors import ModelClosedError, NxdError, RankError


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
