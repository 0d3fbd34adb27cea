"""Writes log lines in a thread of its own: a full pipe that nobody reads must not stop the event loop."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time

LINES = 4096
"""Lines that may wait to be written; further ones are dropped."""
FLUSH_SECONDS = 1.0
RETRY_SECONDS = 0.05


class LogWriter(logging.Handler):
    """Formats records in the caller's thread, and writes them to a copy of a descriptor in its own.

    Lines that find ``limit`` others waiting are dropped and counted; one line says how many, once all before it have
    been written.
    """

    def __init__(self, descriptor: int, limit: int = LINES):
        super().__init__()
        self._descriptor, self._limit = os.dup(descriptor), limit
        self._waiting: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nxd-log", daemon=True)
                self._thread.start()
            with self._counting:
                if self._waiting.qsize() < self._limit:
                    self._waiting.put(line)
                else:
                    self._dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until everything has been written, but at most a second: nobody may be reading."""
        if self._thread is not None and self._thread.is_alive():
            written = threading.Event()
            self._waiting.put(written)
            written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        self.flush()
        self._waiting.put(None)  # the descriptor is the thread's, which may be writing
        super().close()

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            if isinstance(line, str):
                self._write(line)
            if self._dropped and self._waiting.empty():
                self._report()
            if isinstance(line, threading.Event):
                line.set()
        if self._dropped:
            self._report()
        os.close(self._descriptor)

    def _report(self) -> None:
        with self._counting:
            dropped, self._dropped = self._dropped, 0
        text = "%d lines of the log were dropped, because standard error was full and nobody read it"
        record = logging.LogRecord("nxd_server", logging.WARNING, __file__, 0, text, (dropped,), None)
        self._write(self.format(record))

    def _write(self, line: str) -> None:
        # Not through sys.stderr: a thread that holds its lock when the interpreter ends would abort the process.
        left = memoryview((line + "\n").encode(errors="backslashreplace"))
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another process has made the pipe non-blocking
                time.sleep(RETRY_SECONDS)
            except OSError:  # its reader has gone
                return
