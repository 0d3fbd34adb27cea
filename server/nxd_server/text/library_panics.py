"""Panics of ``tokenizers`` and ``llguidance`` as ordinary exceptions.

Their Rust code panics on some damaged files, texts and ids. The class of a panic cannot be imported and is not an
Exception, so it would end the thread that it reaches, with everyone whom that serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class LibraryPanic(Exception):
    """The library panicked; the message is its own."""


@contextlib.contextmanager
def no_panics() -> Iterator[None]:
    """Raise LibraryPanic if the library panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise LibraryPanic(str(error)) from None
