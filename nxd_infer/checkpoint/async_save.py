"""The asynchronous save of a process: at most one at a time, and the process waits for it before it exits."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (before the hook below)
import contextlib
import logging
import sys
import threading
from collections.abc import Callable

from nxd_infer.checkpoint.folder import rank_stem
from nxd_infer.checkpoint.storage import Storage
from nxd_infer.errors import CheckpointError
from nxd_infer.processes.own import leave


class Outstanding:
    """The asynchronous save in progress, at most one per process. The interpreter waits for it at exit."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, storage: Storage, folder: str, rank: int, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                action()
            except Exception as error:  # wait() raises it
                self._error = error
                with contextlib.suppress(OSError, CheckpointError):  # rank 0 may have given up and removed the folder
                    storage.write(f"{folder}/{rank_stem(rank)}.failed", f"{error}".encode())

        self.wait()
        self._thread = threading.Thread(target=run, name="nxd-async-save", daemon=False)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended, whether or not the save succeeded."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until everything is written. Raises the save's error, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the last asynchronous save failed: {error}") from error

    def report(self) -> None:
        """At exit, turn an unreported failure into a failed exit status, so that it does not look like a success.

        An exception here would only be printed, with exit status 0. Handlers registered after this module was imported
        have already run; flush the log and the output before exiting.
        """
        if self._error is None:
            return
        print(f"nxd_infer: the last asynchronous save failed: {self._error}", file=sys.stderr)
        logging.shutdown()
        leave(1)


outstanding = Outstanding()
# Must run before the thread pools close, because stores use them to resolve addresses, and atexit runs after that. The
# hook has no public name; concurrent.futures uses it too, and the last one registered is called first.
getattr(threading, "_register_atexit", atexit.register)(outstanding.join)
atexit.register(outstanding.report)
