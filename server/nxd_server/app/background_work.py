"""What a server does while its ranks start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from nxd_infer.errors import ArtifactError


class BackgroundWork:
    """``work``, in a daemon thread, so that the process can exit before it is done."""

    def __init__(self, what: str, work: Callable[[], None]):
        """``what``: in words, for errors."""
        self._what = what
        self._done: Future[None] = Future()
        threading.Thread(target=self._run, args=[work], name="nxd-background", daemon=True).start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._done.set_result(None)
        except Exception as error:
            self._done.set_exception(error)
        except BaseException as error:  # it would end the thread that waits, without a word
            self._done.set_exception(RuntimeError(f"{self._what} was ended by {type(error).__name__}: {error}"))

    def wait(self, seconds: float) -> None:
        """Wait until it is done. Raises what it raised, and ArtifactError after ``seconds``."""
        wait([self._done], seconds)
        if not self._done.done():
            raise ArtifactError(f"{self._what} has taken more than {seconds:.0f} s: raise start_timeout if it is slow")
        self._done.result()
