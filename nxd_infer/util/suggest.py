"""The name that was probably meant, for the error of one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.75
"""Share of equal letters. Below it names only look alike: ``input`` is no slip for ``min_p``."""


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """``"; did you mean port?"`` for a name that is really near one that is known, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=NEAR)
    return f"; did you mean {' or '.join(near)}?" if near else ""
