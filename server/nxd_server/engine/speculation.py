"""Speculation: guess the next tokens of some rows, verify all guesses in one step, keep the right ones.

Prompt lookup guesses that the tokens that followed the last few tokens earlier in the text follow them again. Answers
that quote, edit, summarise or repeat themselves repeat their context; this drafting needs no model. Source: "Prompt
Lookup Decoding", Apoorv Saxena, 2023. A draft model guesses in :mod:`nxd_server.engine.draft_model`.

A verifying step reads the weights once for several tokens per row. After every guess it draws the token that a
separate step would draw there, from the same seed and position. A guess is accepted if it equals that token, so
answers are the same with and without speculation, greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from nxd_infer.errors import ModelConfigError
from nxd_infer.util.options import whole_number
from nxd_server.engine.request import Sequence as Generated
from nxd_server.engine.scheduler import Row, Step
from nxd_server.engine.step_runner import Graph, StepCosts

RUNS = (3, 2)
"""Lengths of the n-grams to look up, the more reliable one first."""
USUAL = 4
"""Guesses a step that are advised."""
RECENT = 0.2
"""The weight of the newest guess in the acceptance rate."""
RETRY = 32
"""Verify one step in this many whose guesses would not pay, because measured times may have changed."""


def split_graphs(graphs: Iterable[Graph], metadata: dict[str, Any], speculate: int) -> tuple[list[Graph], list[Graph]]:
    """Return the graphs that decode and prefill, and those that verify ``speculate`` guesses (none for 0).

    Raises ModelConfigError like :func:`check_speculate`.
    """
    traced = check_speculate(metadata, speculate)
    listed = list(graphs)
    verifying = [graph for graph in listed if traced and graph.length == traced + 1]
    return [graph for graph in listed if graph not in verifying], verifying if speculate else []


def check_speculate(metadata: dict[str, Any], speculate: int, for_draft: str = "") -> int:
    """Return how many guesses the artifact verifies. Raises ModelConfigError if that is less than ``speculate``, or 0
    ``for_draft``, which says whose draft and which model."""
    traced = int(metadata.get("speculate", 0))
    whole_number("speculate", speculate, ModelConfigError, minimum=0)
    if speculate > traced or (for_draft and not traced):
        ability = f"verifies {traced} guesses at most" if traced else "was traced without a graph that verifies guesses"
        asked = for_draft or f"speculate = {speculate}: this artifact"
        raise ModelConfigError(f"{asked} {ability}; trace the model again with --speculate {speculate or USUAL}")
    return traced


class Acceptance:
    """How often guesses are right, learnt from those of late."""

    def __init__(self, rate: float = 0.5):
        self.rate = rate
        """The acceptance rate of recent guesses whose predecessors were accepted."""

    def learn(self, right: int, tried: int, weight: float = RECENT) -> None:
        """Record that of ``tried`` guesses the first ``right`` were accepted; those after a wrong guess are ignored."""
        for place in range(min(right + 1, tried)):
            self.rate += weight * ((place < right) - self.rate)

    def expected(self, count: int) -> float:
        """Return the expected number of accepted guesses out of ``count``: each needs all earlier ones to be right."""
        return sum(self.rate ** (place + 1) for place in range(count))


class Lookup(Acceptance):
    """The n-gram index of one sequence, prompt and answer. Extending and drafting are O(1) per token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        """The position after the latest occurrence of an n-gram, except one at the end of the text."""

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


class Speculation:
    """Adds guesses to decode steps if they pay, and counts accepted ones. Used only by the engine's thread."""

    def __init__(self, graphs: Iterable[Graph], tokens: int, costs: StepCosts):
        """``graphs`` verify, each at its batch size; ``tokens``: most guesses per row."""
        self._graphs = {graph.batch: graph for graph in graphs}
        self.active = bool(self._graphs)
        self.wants = self.active
        """Whether the next step may have guesses: then its tokens must be known before it begins."""
        self._tokens = tokens
        self._costs = costs
        self._lookups: WeakKeyDictionary[Generated, Lookup] = WeakKeyDictionary()
        self._passed = 0
        self.drafted = 0
        self.accepted = 0

    def put(self, step: Step) -> Step:
        """Return ``step`` with guesses in its rows, for the verifying graph; ``step`` itself if that would not pay."""
        graph = self._graphs.get(step.graph.batch)
        if step.kind != "decode" or graph is None:
            return step
        rows, gain = [], 0.0
        for row in step.rows:
            lookup = self.lookup(row.sequence)
            draft = self._draft(row.sequence, lookup)
            gain += lookup.expected(len(draft))
            rows.append(replace(row, draft=draft))
        if not gain:
            return step
        if (len(rows) + gain) * self._costs[step.graph.name] <= len(rows) * self._costs[graph.name]:
            self._passed += 1
            if self._passed % RETRY:
                return replace(step, rows=tuple(rows))  # keep the guesses, to learn from them, but do not feed them
        return self.verifying(graph, rows)

    def verifying(self, graph: Graph, rows: Iterable[Row]) -> Step:
        """Return the step that feeds the guesses of ``rows``."""
        rows = tuple(replace(row, length=1 + len(row.draft)) for row in rows)
        self.drafted += sum(len(row.draft) for row in rows)
        return Step("decode", graph, rows)

    def saw(self, step: Step, outputs: Mapping[str, Any]) -> None:
        """Take note of the outputs of ``step``, whose rows end after their last right guess."""

    def ended(self, sequence: Generated) -> None:
        """Take note that ``sequence`` has ended."""

    def lookup(self, sequence: Generated) -> Lookup:
        """Return the n-gram index of ``sequence``, which lives as long."""
        return self._lookups.setdefault(sequence, Lookup())

    def acceptance(self, sequence: Generated) -> Acceptance:
        """Return what is known of the guesses for ``sequence``."""
        return self.lookup(sequence)

    def learn(self, row: Row, right: int, tried: int) -> None:
        """Take note that of ``tried`` guesses in ``row`` the first ``right`` were accepted."""
        self.acceptance(row.sequence).learn(right, tried)

    def _draft(self, sequence: Generated, lookup: Lookup) -> tuple[int, ...]:
        count = room(sequence, self._tokens)
        if count == 0:
            return ()
        known = len(lookup.tokens)
        lookup.extend(sequence.tokens(known, sequence.known - known))
        return lookup.draft(count)

    def settle(self, row: Row, tokens: Sequence[int]) -> Row:
        """Return ``row`` cut after its last right guess; ``tokens`` are the step's outputs after each token fed."""
        if not row.draft:
            return row
        right, tried = 0, max(1, row.length - 1)  # a guess that was not fed is compared with the next token
        while right < tried and row.draft[right] == tokens[right]:
            right += 1
        self.learn(row, right, tried)
        if row.length == 1:
            return row
        self.accepted += right
        row.sequence.computed = row.start + 1 + right  # cache entries of wrong guesses get overwritten
        return replace(row, length=1 + right)


def may_be_guessed(sequence: Generated) -> bool:
    """Return whether any token may be guessed: counts of wrong guesses, which penalties need, could not be undone; and
    each guess would need a mask of its own."""
    return not (sequence.params.penalised or sequence.guided)


def room(sequence: Generated, tokens: int) -> int:
    """Return how many tokens may be guessed for ``sequence``, at most ``tokens``."""
    params, generated = sequence.params, len(sequence.output)
    if not may_be_guessed(sequence):
        return 0
    room = min(tokens, sequence.max_new_tokens - generated - 1)
    if generated < params.min_tokens:  # one mask against ending holds for all tokens of a row
        room = min(room, params.min_tokens - generated - 1)
    return max(0, room)
