"""What a fuzz target is: a parser, what it may raise, and examples to begin with."""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.mutations import JSON, Form, changed

CORPUS = Path(__file__).parent / "corpus"
MEMORY = 2 << 30
"""Bytes that reading one example may take."""


@dataclass
class Target:
    """``read`` takes an example; it raises for a defect only, after which the example belongs into the corpus."""

    name: str
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    """What ``read`` may raise: errors of ours that say what is wrong."""
    made: list[bytes] = field(default_factory=list)
    """Examples made by this version, beside those of the corpus."""
    form: Form = JSON
    examples: int = 200
    """How many mutations a test makes."""

    def __post_init__(self) -> None:
        self.folder = CORPUS / self.name

    def seeds(self) -> list[bytes]:
        """The corpus, and what was made."""
        return [path.read_bytes() for path in sorted(self.folder.iterdir())] + self.made

    def check(self, example: bytes) -> bool:
        """Read an example within bounds; whether it was taken. Whatever else it raises is a defect."""
        with bounded_memory():
            try:
                self.read(example)
            except self.refusals as error:
                assert str(error), f"{type(error).__name__} without a word"
                return False
        return True

    def try_mutations(self, number: int, examples: int, attempt: Callable[[bytes], None], *phases: Phase) -> None:
        """So many, which follow from a number."""
        limits = settings(
            max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
        )
        seed(number)(limits(given(changed(self.seeds(), self.form))(attempt)))()

    def keep(self, example: bytes) -> Path:
        """Put what was found into the corpus."""
        path = self.folder / f"found-{hashlib.sha256(example).hexdigest()[:12]}"
        path.write_bytes(example)
        return path


def object_with(read: Callable[[bytes], object], *names: str) -> Callable[[bytes], None]:
    """``read`` for examples that hold several files by name; what is no such object is not an example at all."""

    def checked(example: bytes) -> None:
        try:
            whole = json.loads(example)
        except (ValueError, RecursionError):
            return
        if isinstance(whole, dict) and all(name in whole for name in names):
            read(example)

    return checked


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """A MemoryError, rather than a machine that swaps, for what takes more than ``MEMORY``."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
