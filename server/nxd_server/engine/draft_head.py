"""An EAGLE head as draft: it guesses from the hidden states that the target's steps give.

It reads pairs: a token, and the target's hidden state of the token before. So a token must have run through the target
first, which all but the last have before every step: what is accepted is read again, with the target's states in place
of the head's own, from which it had guessed.

Hidden states are kept from a step's end until the head has read them, and behind an answer's end if they are few. Of a
prompt's beginning that the target took from its cache there are none. As far as the head has read it in the same slot,
it goes on there; else it begins with the first state there is, as if the text began there: positions in its cache count
from ``base``, and rotary positions are relative. So it does for texts that run when its ranks are lost, and for those
that have filled its cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nxd_server.engine.draft_model import DraftModel, Fed
from nxd_server.engine.request import Sequence as Generated
from nxd_server.engine.scheduler import UNKNOWN, Row
from nxd_server.engine.step_tensors import StepInputs

FEW = 64
"""Tokens whose states may be kept behind an answer's end, for a conversation's next turn."""


@dataclass(slots=True)
class _Read:
    """What a slot of the head's cache holds: pairs of the hidden states of the tokens from ``base`` to ``count - 1`` of
    ``sequence``, each with the next token; and ``hidden``, the states from ``count`` on."""

    sequence: Generated
    base: int
    count: int
    end: int
    """The first token whose state is not there."""
    hidden: deque[np.ndarray] = field(default_factory=deque)
    """Each [tokens, F], in order, as steps gave them: thousands, if the head is far behind."""

    def states(self, start: int, length: int) -> np.ndarray:
        """Return the states of ``length`` tokens, or as many as there are, from token ``start`` on."""
        parts, skipped = [], start - self.count
        for given in self.hidden:
            parts.append(given[skipped:][:length])
            skipped, length = max(0, skipped - len(given)), length - len(parts[-1])
            if not length:
                break
        return np.concatenate(parts)

    def go_on(self, tokens: int) -> None:
        """Take note that so many more are read, and forget their states."""
        self.count += tokens
        while tokens > 0:
            first = self.hidden.popleft()
            if len(first) > tokens:
                self.hidden.appendleft(first[tokens:])
            tokens -= len(first)

    def cut(self, end: int) -> None:
        """Forget everything from token ``end`` on."""
        while self.end > max(end, self.count):
            last = self.hidden.pop()
            self.end -= len(last)
            if self.end < end:
                self.hidden.append(last[: end - self.end])
                self.end = end
        self.count, self.end = min(self.count, end), min(self.end, end)


class DraftHead(DraftModel):
    """The ranks of a head."""

    feeds_back = UNKNOWN
    _read: dict[int, _Read]

    def learn_hidden(self, row: Row, hidden: Any) -> None:
        sequence, start, slot = row.sequence, row.start, row.sequence.slot
        read = self._of(sequence) if slot is None else self._read.get(slot)
        if read is not None and read.sequence is not sequence:
            read.cut(self._shared(read, sequence))
            read.sequence = sequence
        if read is not None:
            read.cut(start)
        if read is None or not read.base <= start == read.end or start + row.length - read.base > self.max_len:
            if slot is None:
                return
            read = self._read[slot] = _Read(sequence, start, start, start)
        read.hidden.append(np.asarray(hidden[: row.length]).astype(np.float32))  # copied: the next step overwrites them
        read.end += row.length

    def drop_hidden(self, sequence: Generated) -> None:
        read = self._of(sequence)
        if read is not None and (read.end - read.count > FEW or not sequence.ended):
            read.cut(read.count)
        elif read is not None and read.hidden:
            read.hidden = deque([np.concatenate(read.hidden)])  # no parts of a long prompt's array

    def _of(self, sequence: Generated) -> _Read | None:
        """Return what is read of ``sequence``, which may have ended while a step with it ran."""
        return next((read for read in self._read.values() if read.sequence is sequence), None)

    def _shared(self, read: _Read, sequence: Generated) -> int:
        """Return how many tokens of ``sequence`` have the states that ``read`` holds, if the target begins behind them:
        after a change of its weights it does not. The last of them may be paired with the token that came next before:
        one wrong pair, where without its state all would begin anew."""
        before, now = read.sequence.tokens(0, read.end), sequence.tokens(0, read.end)
        pairs = enumerate(zip(before, now, strict=False))
        return next((place for place, (a, b) in pairs if a != b), min(len(before), len(now)))

    def free(self, sequence: Generated) -> int:
        read = self._read.get(sequence.slot or 0)
        if read is None or read.sequence is not sequence or not read.count < read.end == sequence.known - 1:
            return 0
        return max(0, self.max_len - (sequence.known - read.base))

    def behind(self, sequence: Generated) -> int:
        return sequence.known - 1 - self._read[sequence.slot or 0].count

    def _row(self, sequence: Generated, start: int, given: Sequence[int]) -> Fed:
        return super()._row(sequence, start - 1 - self._read[sequence.slot or 0].base, given)

    def _put(self, inputs: StepInputs, index: int, row: Fed) -> None:
        super()._put(inputs, index, row)
        read = self._read[row.sequence.slot or 0]
        inputs.put_hidden(index, read.states(read.base + row.start, row.length), read.base + 1)

    def _keep(self, sequence: Generated, tokens: int, guesses: Sequence[int] = ()) -> None:
        self._read[sequence.slot or 0].go_on(tokens)
