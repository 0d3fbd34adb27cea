"""An error has one text: if two places raise the same one, their texts drift apart unnoticed."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

SERVER = Path(__file__).parents[3] / "server/nxd_server"
SHORTEST = 25
"""Characters that make a text of its own; ``must not`` is grammar."""


def raised_texts(path: Path) -> list[tuple[str, int]]:
    """The texts inside the ``raise`` statements of a file (``{}`` for what is filled in), and their lines."""
    found = []
    for statement in ast.walk(ast.parse(path.read_text())):
        if not isinstance(statement, ast.Raise) or statement.exc is None:
            continue
        for part in ast.walk(statement.exc):
            if isinstance(part, ast.JoinedStr):
                pieces = [value.value if isinstance(value, ast.Constant) else "{}" for value in part.values]
                found.append(("".join(map(str, pieces)), part.lineno))
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                found.append((part.value, part.lineno))
    return found


def test_the_server_raises_no_text_in_two_places():
    places = collections.defaultdict(set)
    for path in sorted(SERVER.rglob("*.py")):
        for text, line in raised_texts(path):
            if len(text) >= SHORTEST:
                places[text].add(f"{path.name}:{line}")
    assert len(places) > 50, "the search finds the texts there are"
    assert {text: sorted(where) for text, where in places.items() if len(where) > 1} == {}
