"""What a run of the tests makes once, for all of its processes: traced artifacts, above all. It stays as it is: a test
that changes it takes a copy."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

VARIABLE = "NXD_INFER_TESTS_SHARED"


def shared(key: str, make: Callable[[Path], object], seconds: float = 600) -> Path:
    """The folder ``key``, which ``make(folder)`` has filled; ``seconds`` bound the wait for another process."""
    folder = Path(os.environ[VARIABLE]) / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=seconds):
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


class Folder:
    """The plugin of the process that starts the others: they find the folder in their environment."""

    def __init__(self) -> None:
        os.environ[VARIABLE] = self._name = tempfile.mkdtemp(prefix="nxd-infer-tests-")

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        shutil.rmtree(self._name, ignore_errors=True)
