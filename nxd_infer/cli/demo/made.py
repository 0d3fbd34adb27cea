"""What the demo has trained, and how it is traced and asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "model"
"""The model directory in the demo's folder."""


class Question(NamedTuple):
    """A request to the server, and what is printed above its answer."""

    request: Mapping[str, Any]
    title: str
    note: str


@dataclass(frozen=True)
class Made:
    """A model directory with trained weights."""

    directory: Path
    figures: Sequence[tuple[str, str]]
    """Rows for the table at the end."""
    traced: Mapping[str, Any]
    """Options of the trace."""
    questions: Sequence[Question]
