"""Let Ctrl-C and SIGTERM end a command at any point.

Python loses the exception of a signal if it has no caller to raise it in: in a ``__del__``, or in a callback of a weak
reference or of the garbage collector. A trace runs thousands of those. So the signal is remembered, and :func:`check`
raises it again.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

_came: int | None = None


def install() -> None:
    """Make SIGTERM act like Ctrl-C: partial work is undone, temporary files and processes are removed. A Ctrl-C that is
    ignored, as in a shell's background, stays ignored."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def check() -> None:
    """Raise the exception of a received signal again: KeyboardInterrupt, or SystemExit for SIGTERM."""
    if _came == signal.SIGINT:
        raise KeyboardInterrupt
    if _came is not None:
        sys.exit(128 + _came)


def _stop(number: int, _: FrameType | None) -> None:
    global _came
    _came = number
    check()
