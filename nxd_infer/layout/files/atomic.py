"""Files that are there whole or not at all, whenever a process is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from nxd_infer.errors import CheckpointError

TEMPORARY = ".writing-"
REMOVING = ".removing-"
"""Begins the name of a folder that is being removed."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; synced and renamed to ``path`` at the end, removed on failure.

    Whoever reads ``path`` sees the old file or the new one, whole. It has the mode that the umask gives new files.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}{secrets.token_hex(4)}")
    try:
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        temporary.chmod(mode)  # safetensors creates files that only their owner can read
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except SafetensorError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
