"""Where this package keeps what it can make again: built libraries, compiled graphs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$NXD_INFER_CACHE``, else ``$XDG_CACHE_HOME/nxd_infer``, else ``~/.cache/nxd_infer``; made when missing."""
    chosen = os.environ.get("NXD_INFER_CACHE")
    if chosen:
        path = Path(chosen).expanduser()
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        path = (Path(base).expanduser() if base else Path.home() / ".cache") / "nxd_infer"
    path = path.absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path
