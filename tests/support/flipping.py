"""Somebody who replaces a file or folder by a link, again and again, while it is read."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


@contextlib.contextmanager
def flipping(path: Path, link: Path):
    """``path`` is now itself, now a link to ``link``, as fast as a thread can."""
    stop, aside, other = threading.Event(), link.with_name("aside"), link.with_name("link")
    other.symlink_to(link)

    def flip():
        while not stop.is_set():
            os.rename(path, aside)
            os.rename(other, path)
            os.rename(path, other)
            os.rename(aside, path)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
