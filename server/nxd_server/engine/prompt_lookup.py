"""Prompt lookup: guess that the tokens that followed the last few tokens earlier in the text follow them again.

Answers that quote, edit, summarise or repeat themselves repeat their context; this drafting needs no model. Source:
"Prompt Lookup Decoding", Apoorv Saxena, 2023.
"""

from __future__ import annotations

from collections.abc import Iterable

RUNS = (3, 2)
"""Lengths of the n-grams to look up, the more reliable one first."""
RECENT = 0.2
"""The weight of the newest guess in the acceptance rate."""


class Lookup:
    """The n-gram index of one sequence, prompt and answer. Extending and drafting are O(1) per token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        """The position after the latest occurrence of an n-gram, except one at the end of the text."""
        self.acceptance = 0.5
        """The acceptance rate of recent guesses whose predecessors were accepted."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text = self.tokens
        for token in tokens:
            for run in RUNS:
                if len(text) >= run:
                    self._next[tuple(text[-run:])] = len(text)
            text.append(token)

    def draft(self, count: int) -> tuple[int, ...]:
        """Return the next ``count`` tokens, or none. A repetition up to the end of the text is assumed to continue."""
        text = self.tokens
        for run in RUNS:
            place = self._next.get(tuple(text[-run:]))
            if place is not None:
                return tuple(text[place + i % (len(text) - place)] for i in range(count))
        return ()

    def learn(self, right: int, tried: int) -> None:
        """Record that of ``tried`` guesses the first ``right`` were accepted; those after a wrong guess are ignored."""
        for place in range(min(right + 1, tried)):
            self.acceptance += RECENT * ((place < right) - self.acceptance)

    def expected(self, count: int) -> float:
        """Return the expected number of accepted guesses out of ``count``: each needs all earlier ones to be right."""
        return sum(self.acceptance ** (place + 1) for place in range(count))
