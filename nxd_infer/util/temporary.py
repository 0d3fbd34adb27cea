"""Names of temporary directories."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path


def temporary_name(prefix: str, parent: Path | None = None) -> Path:
    """Return the path of a directory that does not exist, in ``parent`` or where the system keeps temporary files.

    To be made with ``mkdir(mode=0o700)``, inside the ``try`` that removes it: a signal that comes between
    ``tempfile.mkdtemp`` and a ``try`` leaves the directory behind.
    """
    return Path(parent or tempfile.gettempdir(), f"{prefix}{secrets.token_hex(6)}")
