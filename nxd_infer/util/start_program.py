"""Start one of this package's programs that import torch: as a fork where that can be, else in a new interpreter."""

from __future__ import annotations

import logging
import subprocess  # nosec B404
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from nxd_infer.util.child_process import ChildProcess
from nxd_infer.util.fork_server import CannotForkError, fork_server

logger = logging.getLogger(__name__)


def start_program(
    command: Sequence[str],
    imports: str,
    *,
    importing: Mapping[str, str],
    environment: Mapping[str, str],
    inherit: Iterable[int],
    output: int | IO[Any] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> ChildProcess:
    """Run ``command``, one of ``python_command.py``.

    Args:
        imports: module that the fork server imports for it, in the environment ``importing``; "": it is not forked.
        environment: of the program itself.
        inherit: descriptors that it inherits, with the same numbers.
        output: file for its output and its errors, or PIPE; None: those of this process.
        stopped: whether nobody waits for the fork server's import any more; then an interpreter is started.

    Raises OSError if the system does not let it start.
    """
    numbers = list(inherit)
    if imports:
        try:
            server = fork_server(imports, importing)
            return server.fork(command, environment=environment, inherit=numbers, stdout=output, stopped=stopped)
        except CannotForkError as error:
            logger.debug("%s is not forked: %s", imports, error)
    errors = None if output is None else subprocess.STDOUT
    return ChildProcess(command, environment=environment, inherit=numbers, stdout=output, stderr=errors)
