"""Ctrl-C and SIGTERM end a command, wherever it is.

The exception that a signal raises is lost where Python has no caller to hand it to: in a ``__del__``, in a callback of
a weak reference or of the collector, and a trace runs thousands of those. So the signal is remembered, and raised
again at the next place that asks.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

_came: int | None = None


def install() -> None:
    """As Ctrl-C does: what is half done is undone, temporary files and processes end. A Ctrl-C that is ignored, as in a
    shell's background, stays so."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def check() -> None:
    """Raise what a signal that came has raised, once more: KeyboardInterrupt, or SystemExit for SIGTERM."""
    if _came == signal.SIGINT:
        raise KeyboardInterrupt
    if _came is not None:
        sys.exit(128 + _came)


def _stop(number: int, _: FrameType | None) -> None:
    global _came
    _came = number
    check()
