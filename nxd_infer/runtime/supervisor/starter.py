"""Start the processes of ranks: as forks of a process that has torch, if they can be, else as new interpreters."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterable

from nxd_infer.backends import registry
from nxd_infer.errors import ModelClosedError
from nxd_infer.util.child_process import ChildProcess
from nxd_infer.util.fork_server import CannotForkError, ForkServer, fork_server
from nxd_infer.util.python_command import child_environment, python_module

logger = logging.getLogger(__name__)

_MAIN = "nxd_infer.runtime.rank_process.main"
_IMPORTS = "nxd_infer.runtime.rank_process.loop"
"""What a rank imports, with torch."""


class Starter:
    """Starts ranks of a ``backend`` with ``threads`` threads, in the environment of the moment in which it is made."""

    def __init__(self, backend: str, threads: int):
        own = child_environment(PYTHONUNBUFFERED="1", OMP_NUM_THREADS=str(threads))
        self._environment = registry.with_import_path(own, backend)
        self._server: ForkServer | None = None

    def begin(self) -> bool:
        """Start the process from which ranks are forked, or find the one there is; False if they cannot be forked.

        Not for ranks with a crew: each needs its own settings of OpenMP, which are read while torch is imported.
        """
        try:
            self._server = fork_server(_IMPORTS, self._environment)
        except CannotForkError as error:
            logger.debug("ranks are not forked: %s", error)
        return self._server is not None

    def start(self, rank: int, config: str, inherit: Iterable[int], stopped: Callable[[], bool]) -> ChildProcess:
        """Start a rank; its output and errors are in ``stdout``. May wait for torch, until ``stopped()``.

        Raises OSError if the system does not let it start, ModelClosedError if it was stopped.
        """
        command = python_module(_MAIN, "rank", str(rank), "--config", config)
        if self._server is not None:
            try:
                return self._server.fork(
                    command,
                    environment=self._environment,
                    inherit=inherit,
                    stdout=subprocess.PIPE,
                    stopped=stopped,
                )
            except CannotForkError as error:
                if stopped():
                    raise ModelClosedError("the model was closed while its ranks were starting") from None
                logger.debug("rank %d is not forked: %s", rank, error)
        return ChildProcess(
            command,
            environment=self._environment,
            inherit=inherit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
