"""Suggest the intended name in an error about an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.75
"""Minimum share of equal letters. Below it names only look similar: ``input`` is not a typo of ``min_p``."""


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return ``"; did you mean port?"`` if a known name is close to ``name``, else ""."""
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=NEAR)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; the nearest is port"``, however far it is, or "" if nothing is known."""
    listed = sorted(set(known))
    if not listed:
        return ""
    close = max(listed, key=lambda one: difflib.SequenceMatcher(None, name.lower(), one.lower()).ratio())
    return f"; the nearest is {close}"
