"""The save that goes on beside the training: one of a process, and its end waits for it."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (before the hook below)
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

from nxd_infer.checkpoint.folder import rank_stem
from nxd_infer.checkpoint.storage import Storage
from nxd_infer.errors import CheckpointError


class Outstanding:
    """The one save of this process that goes on beside the training. The interpreter waits for it at its end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, storage: Storage, folder: str, rank: int, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                action()
            except Exception as error:  # raised by wait()
                self._error = error
                with contextlib.suppress(OSError, CheckpointError):  # rank 0 may have given up and removed the folder
                    storage.write(f"{folder}/{rank_stem(rank)}.failed", f"{error}".encode())

        self.wait()
        self._thread = threading.Thread(target=run, name="nxd-async-save", daemon=False)
        self._thread.start()

    def join(self) -> None:
        """Until the thread has ended, whatever has become of what it wrote."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Until it is written. Raises what went wrong, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the last asynchronous save failed: {error}") from error

    def report(self) -> None:
        """At the end of the process: nobody has been told of the failure, so the process must not look like a success.

        An exception here would be printed and leave the exit status 0. What was registered after this module was
        imported has run; the output and the log are brought out before.
        """
        if self._error is None:
            return
        print(f"nxd_infer: the last asynchronous save failed: {self._error}", file=sys.stderr)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


outstanding = Outstanding()
# Before the thread pools close, with which stores look up addresses; atexit comes after that. The hook has no public
# name: it is what concurrent.futures uses for itself, and what is registered last is called first.
getattr(threading, "_register_atexit", atexit.register)(outstanding.join)
atexit.register(outstanding.report)
