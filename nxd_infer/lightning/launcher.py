"""Starts this machine's other ranks: each runs the program again, as this process was started.

No rank outlives the first one, and none waits for one that has ended: if a rank fails, so does ``launch``, or the
process ends with status 1 if it is stuck in a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher

from nxd_infer.errors import CollectiveTimeoutError, ParallelConfigError, RankDiedError
from nxd_infer.processes.child import ChildProcess, end_all, wait_for_an_end
from nxd_infer.processes.command import python_of_caller
from nxd_infer.processes.own import leave

GRACE = 10.0
"""Seconds after a rank's failure in which this process may raise its own error, before it is ended."""
PATIENCE = 60.0
"""Seconds that the other ranks may take to end after this one."""
POLL = 0.5

_EXEC = (
    "import os\n"
    "from nxd_infer.processes.own import die_with_parent\n"
    "die_with_parent(int(sys.argv[1]))\n"  # also in force after exec
    "os.execv(sys.executable, sys.argv[2:])"
)


class RankLauncher(_Launcher):
    """Starts ranks 1 to ``count - 1`` at the first ``launch``.

    ``variables``: returns the environment variables of a rank, by its number on this machine.
    """

    def __init__(self, count: int, variables: Callable[[int], Mapping[str, str]]):
        self.count, self._variables = count, variables
        self.ranks: list[ChildProcess] = []
        self._failure = ""
        self._told = threading.Event()
        """The failure was raised, or this process is ending the ranks itself."""

    @property
    def is_interactive_compatible(self) -> bool:
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function`` on all ranks: here directly, and elsewhere by the same program.

        Raises RankDiedError if another rank ended first; ParallelConfigError if this process has no program to repeat.
        """
        if not self.ranks:
            self._start()
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            self._told.set()
            self.kill(signal.SIGINT)  # a terminal sends it to this process only; each rank leaves in its own way
            raise
        except Exception as error:
            # A peer's end is seen in a collective before the process is gone.
            wait_for_an_end(self.ranks, GRACE if isinstance(error, CollectiveTimeoutError) else POLL)
            failure = self._failure or self._look()
            self._told.set()
            end_all(self.ranks, POLL)
            if failure:
                raise RankDiedError(f"{failure}; its own output says why") from error
            raise

    def kill(self, signum: int) -> None:
        """Send a signal to the other ranks."""
        for rank in self.ranks:
            if rank.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signum)

    def _start(self) -> None:
        program = sys.orig_argv[1:]
        files = (getattr(sys.modules["__main__"], "__file__", ""), sys.argv[0])
        if "-c" not in program and not any(map(os.path.exists, files)):
            raise ParallelConfigError(
                f"devices={self.count} runs this program {self.count} times, but an interactive session is not one: "
                f"put it into a file, or start it with `torchrun --nproc_per_node={self.count}`"
            )
        atexit.register(self._end)
        command = python_of_caller(_EXEC, str(os.getpid()), sys.executable, *program)
        for number in range(1, self.count):
            self.ranks.append(ChildProcess(command, environment={**os.environ, **self._variables(number)}))
        threading.Thread(target=self._watch, name="nxd-watch-ranks", daemon=True).start()

    def _look(self) -> str:
        """Say which rank has failed, if one has."""
        for number, rank in enumerate(self.ranks, 1):
            if rank.returncode:
                return f"rank {number} (process {rank.pid}) {rank.explain()}"
        return ""

    def _watch(self) -> None:
        while not self._told.is_set():
            running = [rank for rank in self.ranks if rank.running]
            self._failure = self._look()
            if self._failure or not running:
                break
            wait_for_an_end(running, POLL)
        if self._failure and not self._told.wait(GRACE):
            self._leave(f"{self._failure}, so all ranks end")

    def _end(self) -> None:
        """At exit: let the others end, and do not let a failure among them look like a success."""
        quiet = self._told.is_set()
        self._told.set()
        for rank in self.ranks:
            rank.wait(PATIENCE)
        late = [number for number, rank in enumerate(self.ranks, 1) if rank.running]
        failure = self._look() or (f"ranks {late} had not ended after {PATIENCE:g} s" if late else "")
        end_all(self.ranks)
        if failure and not quiet:
            self._leave(failure)

    def _leave(self, failure: str) -> None:
        end_all(self.ranks)
        print(f"nxd_infer: {failure}", file=sys.stderr)
        leave(1)
