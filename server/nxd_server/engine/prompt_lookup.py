"""Prompt lookup: guess that what stood behind the last few tokens before stands behind them again.

Answers that quote, edit, summarise or go in circles repeat their own context; guessing so costs no model. Source:
"Prompt Lookup Decoding", Apoorv Saxena, 2023.
"""

from __future__ import annotations

from collections.abc import Iterable

RUNS = (3, 2)
"""Lengths of the runs that are looked for, the surer one first."""
RECENT = 0.2
"""The weight of the newest guess in the share of right ones."""


class Lookup:
    """The text of one sequence, prompt and answer, by its runs of tokens. Extending and guessing are O(1) a token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        """Where the text goes on behind the newest place of a run. The text's end is no such place: nothing follows."""
        self.share = 0.5
        """Of recent guesses behind right ones, how many were right: what to expect of the next."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text."""
        text = self.tokens
        for token in tokens:
            for run in RUNS:
                if len(text) >= run:
                    self._behind[tuple(text[-run:])] = len(text)
            text.append(token)

    def draft(self, count: int) -> tuple[int, ...]:
        """The next ``count`` tokens, or none. A repetition that reaches the end of the text is taken to go on."""
        text = self.tokens
        for run in RUNS:
            place = self._behind.get(tuple(text[-run:]))
            if place is not None:
                return tuple(text[place + i % (len(text) - place)] for i in range(count))
        return ()

    def learn(self, right: int, tried: int) -> None:
        """Of ``tried`` guesses the first ``right`` were right; those behind a wrong one say nothing."""
        for place in range(min(right + 1, tried)):
            self.share += RECENT * ((place < right) - self.share)

    def expected(self, count: int) -> float:
        """Of ``count`` guesses, how many will be accepted: each needs all before it."""
        return sum(self.share ** (place + 1) for place in range(count))
