"""The demo's training text: the Python language reference, which ships with Python."""

from __future__ import annotations

HELD_OUT = ("import", "strings")
"""Held-out chapters, used only for evaluation: unlike most, they share no paragraph with another chapter."""


def documents() -> list[str]:
    """Return the chapters of the language reference (``pydoc_data.topics``), about 0.5 MB of English in total."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def split() -> tuple[list[str], list[str]]:
    """Return the chapters to train on and the held-out chapters."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics) if name not in HELD_OUT], [topics[name] for name in HELD_OUT]
