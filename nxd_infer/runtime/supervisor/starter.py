"""Start the processes of ranks."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterable

from nxd_infer.backends import registry
from nxd_infer.util.child_process import ChildProcess
from nxd_infer.util.fork_server import CannotForkError, fork_server
from nxd_infer.util.python_command import child_environment, python_module
from nxd_infer.util.start_program import start_program

logger = logging.getLogger(__name__)

_MAIN = "nxd_infer.runtime.rank_process.main"
_IMPORTS = "nxd_infer.runtime.rank_process.loop"
"""What a rank imports, with torch."""


class Starter:
    """Starts ranks of a ``backend`` with ``threads`` threads, in the environment of the moment in which it is made."""

    def __init__(self, backend: str, threads: int):
        own = child_environment(PYTHONUNBUFFERED="1", OMP_NUM_THREADS=str(threads))
        self._environment = registry.with_import_path(own, backend)
        self._imports = ""

    def begin(self) -> bool:
        """Start the process from which ranks are forked, or find the one there is; False if they cannot be forked.

        Not for ranks with a crew: each needs its own settings of OpenMP, which are read while torch is imported.
        """
        try:
            fork_server(_IMPORTS, self._environment)
            self._imports = _IMPORTS
        except CannotForkError as error:
            logger.debug("ranks are not forked: %s", error)
        return bool(self._imports)

    def start(self, rank: int, config: str, inherit: Iterable[int], stopped: Callable[[], bool]) -> ChildProcess:
        """Start a rank; its output and errors are in ``stdout``. May wait for torch, until ``stopped()``.

        Raises OSError if the system does not let it start.
        """
        return start_program(
            python_module(_MAIN, "rank", str(rank), "--config", config),
            self._imports,
            importing=self._environment,
            environment=self._environment,
            inherit=inherit,
            output=subprocess.PIPE,
            stopped=stopped,
        )
