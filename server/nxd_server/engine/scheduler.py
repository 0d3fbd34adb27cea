"""Which graph runs next, with which rows. Pure logic: it sees lengths and measured times, never a model.

* Waiting choices get a free slot in a fair order (:mod:`nxd_server.engine.fair_queue`).
* A prompt is split into pieces: first full pieces of the largest graph, then the smallest graph that fits the rest
  (``<=``), or several smaller ones if measured times show that they are clearly cheaper.
* While anything decodes, prefill is bounded: after a prefill step every decoding choice advances before the next one,
  and prefill takes at most ``prefill_ratio`` times as long as the decoding in between. A piece must be short enough
  that it and the decode step after it take at most ``stall_ratio`` times as long as the fastest decode step, if
  there is such a graph.
* A decode step takes the graph with the most rows per second, at most the smallest that fits every slot, and the
  rows that have waited longest. If rows may share a slot (``mixes``), prompt tokens fill the remaining rows, in graphs
  of any size that delay decoding by no more than pieces may; or, if that would be less than half as fast for prompts,
  by no more than the shortest piece would. While no piece is short enough and such rows remain, prompts advance only
  in these rows.
* A prompt whose tokens get log-probabilities goes in rows of one token, each with an output of its own, and takes turns
  with the pieces of others.
* With ``prefix_caching`` a prompt begins in the slot that holds most of its tokens, after these tokens.
* If prompts are read whole (``whole_prompts``, by an encoder), one is one piece, in the smallest graph of prompts that
  fits, however long decoding waits.
* Where a choice follows a grammar, a step begins only after the previous one: its token decides what may come next.
* With a pipeline of ``groups`` stages, a decode step takes an equal share of the decoding choices, so that each stage
  works on another share. A choice waits for the token of its last step: the first stage must know it; and for
  others to fill its share, while every stage has work. Once all have advanced and wait, a prompt's step may begin
  whatever the ratio is: the first stage has nothing else to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from nxd_server.engine.fair_queue import FairQueue
from nxd_server.engine.request import Sequence
from nxd_server.engine.step_runner import CLEAR_GAIN, Graph, StepCosts

PLANNED = 0.75
"""Plan for this fraction of the allowed delay of streams: steps vary, and requests and answers take time too."""
MAX_PIECES = 32
"""A piece is never split into many more smaller ones than this."""

FEWEST_REUSED = 16
"""A prompt that shares fewer tokens with a slot does not seek it: the slot that was free for the longest time may hold
as many, and what is overwritten is worth less."""

UNKNOWN = -1
"""Fed for a token that the previous step will give; the graph knows it (``nxd_models.serving.decoder_step``)."""


@dataclass(slots=True)
class Row:
    """``length`` tokens of ``sequence`` from position ``start`` on. ``samples``: its output is the next token.

    A decode row of more than one token feeds ``draft`` after it; once it has run, ``length`` covers the right ones.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    draft: tuple[int, ...] = ()

    def tokens(self) -> list[int]:
        """The tokens that the row feeds."""
        sequence = self.sequence
        if self.length == 1 and self.start == len(sequence.prompt) + len(sequence.output):
            return [UNKNOWN]
        if not self.draft:
            return sequence.tokens(self.start, self.length)
        return [*sequence.tokens(self.start, 1), *self.draft[: self.length - 1]]


@dataclass(slots=True)
class Step:
    """One execution of one graph. Rows beyond ``rows`` are padding. In a mixed step the last rows are prompt tokens,
    in order for each choice."""

    kind: Literal["prefill", "decode", "mixed"]
    graph: Graph
    rows: tuple[Row, ...]


class Scheduler:
    """Not thread-safe: used only by the engine's thread."""

    def __init__(
        self,
        graphs: Iterable[Graph],
        slots: int,
        costs: StepCosts,
        *,
        prefill_ratio: float = 4.0,
        stall_ratio: float = 4.0,
        mixes: bool = False,
        whole_prompts: bool = False,
        groups: int = 1,
        prefix_caching: bool = False,
    ):
        if prefill_ratio <= 0 or stall_ratio < 1:
            raise ValueError(
                f"prefill_ratio is more than 0 and stall_ratio at least 1, got {prefill_ratio}, {stall_ratio}"
            )
        self.graphs = sorted(graphs, key=lambda graph: (graph.length, graph.batch))
        if not self.graphs:
            raise ValueError("an engine needs at least one graph")
        self.costs = costs
        self.slots = SlotPool(slots)
        self.prefill_ratio = prefill_ratio
        self.stall_ratio = stall_ratio
        self.groups = groups
        self.whole_prompts = whole_prompts
        self.prefix_caching = prefix_caching and not whole_prompts
        self._rows_share_slots = mixes
        self.mixes = mixes and stall_ratio < inf  # without a bound, full pieces are cheaper
        shortest = self.graphs[0].length
        self._shared_graphs = [graph for graph in self.graphs if graph.length == shortest]
        # Decoding alone uses no graph above the smallest that fits every slot; larger ones exist only for mixed steps.
        fits = sum(graph.batch < slots for graph in self._shared_graphs)
        self._decode_graphs = self._shared_graphs[: fits + 1]
        self._lengths = sorted({graph.length for graph in self.graphs})
        self._waiting: FairQueue[Sequence] = FairQueue()
        self._prefilling: list[Sequence] = []
        self._decoding: dict[int, Sequence] = {}
        self._owed: set[int] = set()
        """Decoding choices that have not advanced since the last prefill step."""
        self._debt = 0.0
        """Seconds of decoding that must run before the next prefill step."""
        self._scored_last = False
        """Whether the last prefill step was one of log-probabilities."""

    # --- contents --------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return self.slots.used

    @property
    def live_tokens(self) -> int:
        """Cache positions that hold tokens of running choices."""
        return sum(sequence.computed for sequence in (*self._decoding.values(), *self._prefilling))

    def sequences(self) -> Iterator[Sequence]:
        """Yield all unfinished choices, running ones first."""
        yield from [*self._decoding.values(), *self._prefilling, *self._waiting]

    # --- adding and removing -----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._waiting.add(sequence, (*self._decoding.values(), *self._prefilling))

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Remove a choice, finished or not, and free its slot. Idempotent. ``keep``: the steps that it was in have run,
        or will run before any other."""
        self._owed.discard(sequence.id)
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        if self._decoding.pop(sequence.id, None) is None:
            self._prefilling.remove(sequence)
        kept = sequence.tokens(0, sequence.computed) if keep and self.prefix_caching else ()
        self.slots.release(sequence.slot, kept, sequence.cache_key)
        sequence.slot = None

    # --- the next step --------------------------------------------------------------------------------

    def admit(self, allowed: Callable[[Sequence], bool] = lambda sequence: True) -> list[Sequence]:
        """Give free slots to waiting choices that are ``allowed``, in their order; return those that got one."""
        admitted = list(itertools.islice(filter(allowed, self._waiting.in_order()), self.slots.free))
        for sequence in admitted:
            self._waiting.remove(sequence)
            # Penalties count the tokens that steps are fed since a sequence began in its slot, at position 0.
            reuses = self.prefix_caching and not sequence.params.penalised and sequence.params.prompt_logprobs is None
            prompt = sequence.prompt if reuses else ()
            sequence.slot, sequence.reused = self.slots.allocate(prompt, sequence.cache_key)
            sequence.computed = sequence.reused
            self._waiting.charge(sequence, sequence.remaining)
            self._prefilling.append(sequence)
        return admitted

    def next_step(self) -> Step | None:
        """Return the step to run now; None if nothing is admitted or all choices wait for steps in flight. Call
        :meth:`begin` once the ranks have it."""
        streams = self._streams()
        if not streams:
            return self._prefill_step(0) if self._prefilling else None
        known = self._known(streams)
        if self.groups == 1 and len(known) < len(streams):
            return None  # a step of the others alone would take as long as the next one of all
        ready = self._share(known, len(streams))
        count = max(1, len(ready))
        graph, prompts = self._plan(count)
        due = not self._owed and (self._debt <= 0 or not known)
        if self._prefilling and due and not (prompts and not self._short_lengths(count)):
            return self._prefill_step(count)
        return self._decode_step(graph, ready, prompts) if ready else None

    def begin(self, step: Step) -> None:
        """Account for ``step`` as if it had run, so that the next one, which runs after it, can be planned."""
        seconds = self.costs[step.graph.name]
        if step.kind == "prefill":
            streams = self._streams()
            self._owed = {sequence.id for sequence in streams}
            self._debt = seconds / self.prefill_ratio if streams else 0.0
        else:
            self._debt -= seconds
        for row in step.rows:
            sequence = row.sequence
            self._owed.discard(sequence.id)
            sequence.computed = row.start + row.length
            if row.start >= len(sequence.prompt):
                self._waiting.charge(sequence, row.length)
            if row.samples and sequence.id not in self._decoding:
                self._prefilling.remove(sequence)
                self._decoding[sequence.id] = sequence

    def _streams(self) -> list[Sequence]:
        """Return the choices that decode and may want another token, those that have waited longest first."""
        return [sequence for sequence in self._decoding.values() if sequence.goes_on]

    def _known(self, streams: list[Sequence]) -> list[Sequence]:
        """Return those of ``streams`` that the next step can have: with a pipeline, the first stage must be told their
        last token; and a grammar says what may follow only if it is known."""
        if self.groups == 1 and not any(stream.guided for stream in streams):
            return streams
        return [stream for stream in streams if not (stream.waits and (self.groups > 1 or stream.guided))]

    def _share(self, known: list[Sequence], streams: int) -> list[Sequence]:
        """Return the choices for the next decode step, of ``streams`` in all.

        A part of a share waits while the others keep every stage at work: it would stay a step of its own, which
        takes as long as a full one.
        """
        share = -(-streams // self.groups)
        if len(known) < share and streams - len(known) > (self.groups - 1) * share:
            return []
        return known[:share]

    def _prefill_step(self, streams: int) -> Step:
        scored = [sequence for sequence in self._prefilling if sequence.scores is not None]
        others = [sequence for sequence in self._prefilling if sequence.scores is None]
        self._scored_last = bool(scored) and not (others and self._scored_last)
        if self._scored_last:
            candidates = self._shared_graphs
            rows = list(itertools.islice(self._token_rows(scored), candidates[-1].batch))
        else:
            length = self.piece(others[0].remaining, streams)
            candidates = [graph for graph in self.graphs if graph.length == length]
            rows = [self._prefill_row(sequence, length) for sequence in others[: candidates[-1].batch]]
        graph = self.costs.cheapest(candidates, lambda graph: sum(row.length for row in rows[: graph.batch]))
        return Step("prefill", graph, tuple(rows[: graph.batch]))

    def _prefill_row(self, sequence: Sequence, length: int) -> Row:
        size = min(length, sequence.remaining)
        return Row(sequence, sequence.computed, size, samples=size == sequence.remaining)

    def _decode_graph(self, count: int) -> Graph:
        return self.costs.cheapest(self._decode_graphs, lambda graph: min(graph.batch, count))

    def _plan(self, count: int) -> tuple[Graph, list[Row]]:
        """Return the graph of the next step that decodes ``count`` rows, and one row per prompt token for the rows that
        remain in it."""
        if self.mixes and self._prefilling:
            graphs = self._mixed_graphs(count)
            rows = list(itertools.islice(self._token_rows(self._prefilling), max(0, graphs[-1].batch - count)))
            graph = self.costs.cheapest(graphs, lambda graph: min(graph.batch, count + len(rows)))
            if rows := rows[: max(0, graph.batch - count)]:
                return graph, rows
        return self._decode_graph(count), []

    def _token_rows(self, sequences: Iterable[Sequence]) -> Iterator[Row]:
        """Yield a row for each prompt token that may come next; of each sequence one if rows share no slots."""
        for sequence in sequences:
            end = len(sequence.prompt) if self._rows_share_slots else sequence.computed + 1
            for position in range(sequence.computed, end):
                yield Row(sequence, position, 1, samples=position + 1 == len(sequence.prompt))

    def _mixed_graphs(self, count: int) -> list[Graph]:
        """Return the graphs that keep the bound with ``count`` streams; if prompts would be less than half as fast in
        these, also those that take no longer than the shortest piece would.
        """
        bound = self._bound()
        piece = self._cost_of(self._lengths[:2][-1]) + self.costs[self._decode_graph(count + 1).name]
        graphs = [graph for graph in self._shared_graphs if self.costs[graph.name] <= max(bound, piece)]
        within = [graph for graph in graphs if self.costs[graph.name] <= bound]

        def pace(some: list[Graph]) -> float:
            return max((graph.batch - count) / self.costs[graph.name] for graph in some)

        return within if within and 2 * pace(within) >= pace(graphs) else graphs

    def _decode_step(self, graph: Graph, streams: list[Sequence], prompts: list[Row]) -> Step:
        chosen = streams[: graph.batch]
        for sequence in chosen:  # moves them to the end: the dictionary is ordered by turn
            self._decoding[sequence.id] = self._decoding.pop(sequence.id)
        # Sort by slot, so that a choice mostly stays in the same row, whose inputs then need no rewriting.
        chosen.sort(key=lambda sequence: sequence.slot or 0)
        rows = [Row(sequence, sequence.computed, 1, True) for sequence in chosen]
        return Step("mixed" if prompts else "decode", graph, (*rows, *prompts))

    # --- prefill pieces ------------------------------------------------------------------------------

    def piece(self, remaining: int, streams: int | None = None) -> int:
        """Return the graph length for the next piece of a prompt with ``remaining`` tokens, while ``streams`` choices
        decode (None: the current number)."""
        if self.whole_prompts:  # the shortest graphs decode
            return next(length for length in self._lengths[1:] if length >= remaining)
        streams = len(self._streams()) if streams is None else streams
        # At least the shortest piece, because a prompt must advance.
        lengths = (self._short_lengths(streams) or self._lengths[:2]) if streams else self._lengths
        largest = lengths[-1]
        if remaining >= largest:
            return largest
        fit = next(length for length in lengths if length >= remaining)
        smaller = [length for length in lengths if 1 < length < fit <= MAX_PIECES * length]
        if fit == remaining or not smaller:
            return fit
        cost, first = self._cover(remaining, smaller, {})
        return first if cost < CLEAR_GAIN * self._cost_of(fit) else fit

    def _short_lengths(self, streams: int) -> list[int]:
        """Return the piece lengths that delay decoding by no more than ``stall_ratio`` allows, if any."""
        graph, prompts = self._plan(streams)
        behind = graph if prompts else self._decode_graph(streams + 1)  # the prompt may end and decode too
        room = self._bound() - self.costs[behind.name]
        short = sum(self._cost_of(length) <= room for length in self._lengths)
        return self._lengths[:short] if short > 1 else []

    def _bound(self) -> float:
        """Seconds that decoding choices may wait for their next token, as planned."""
        return PLANNED * self.stall_ratio * min(self.costs[graph.name] for graph in self._decode_graphs)

    def _cost_of(self, length: int) -> float:
        return min(self.costs[graph.name] for graph in self.graphs if graph.length == length)

    def _cover(self, remaining: int, lengths: list[int], known: dict[int, tuple[float, int]]) -> tuple[float, int]:
        """Return the cost and the first piece of the cheapest split of ``remaining`` tokens into ``lengths``."""
        if remaining <= 0:
            return 0.0, 0
        if remaining not in known:
            # Try each larger piece first; the order of pieces does not matter.
            known[remaining] = min(
                (self._cost_of(length) + self._cover(remaining - length, lengths, known)[0], -length)
                for length in lengths
            )
        cost, negative = known[remaining]
        return cost, -negative


# --- the slots of the cache ---


@dataclass(frozen=True)
class _Kept:
    """What a free slot holds: the keys and values of ``tokens``, from position 0 on."""

    key: Hashable
    tokens: np.ndarray
    released: int
    """Larger for slots that were released later."""

    def shared(self, key: Hashable, prompt: np.ndarray) -> int:
        """Return how many tokens at the start of ``prompt`` are held."""
        if key != self.key:
            return 0
        most = min(len(prompt), len(self.tokens))
        differs = self.tokens[:most] != prompt[:most]
        return int(differs.argmax()) if differs.any() else most


_EMPTY = _Kept(None, np.empty(0, np.int64), 0)


class SlotPool:
    """``count`` slots of the KV cache, numbered from 0, each owned by one choice. A free slot keeps what its last owner
    has written, so that a prompt that begins with the same tokens need not compute them again (prefix caching)."""

    def __init__(self, count: int):
        if count < 1:
            raise ValueError(f"an engine needs at least one slot, got {count}")
        self._free = dict.fromkeys(range(count), _EMPTY)
        self._used: set[int] = set()
        self._turns = itertools.count(1)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def allocate(self, prompt: Tokens[int] = (), key: Hashable = None) -> tuple[int, int]:
        """Return a free slot, and how many tokens at the start of ``prompt`` it holds, computed under the same ``key``;
        always fewer than all, since the last one gives the answer's first token.

        It is the slot that holds most of them, if most of its tokens are among them: else less would be gained than is
        overwritten. Otherwise it is the one that was free for the longest time. Raises IndexError if there is none.
        """
        if not self._free:
            raise IndexError("no slot is free")
        wanted = np.asarray(prompt[:-1], np.int64)
        shared = {slot: kept.shared(key, wanted) for slot, kept in self._free.items()}
        slot = max(shared, key=lambda slot: (shared[slot], self._free[slot].released))
        if shared[slot] < max(FEWEST_REUSED, len(self._free[slot].tokens) / 2):
            slot = min(shared, key=lambda slot: (self._free[slot].released, slot))
        del self._free[slot]
        self._used.add(slot)
        return slot, shared[slot]

    def held(self, prompt: Tokens[int], key: Hashable) -> int:
        """Return how many tokens at the start of ``prompt`` a free slot holds at most; 0 for too few to be sought. Any
        thread may ask."""
        wanted = np.asarray(prompt[:-1], np.int64)
        most = max((kept.shared(key, wanted) for kept in list(self._free.values())), default=0)
        return most if most >= FEWEST_REUSED else 0

    def release(self, slot: int, tokens: Tokens[int] = (), key: Hashable = None) -> None:
        """Free a slot, which holds the keys and values of ``tokens``, computed under ``key``.

        Raises KeyError if it is free already: a slot released twice would serve two requests.
        """
        self._used.remove(slot)
        kept = _Kept(key, np.asarray(tokens, np.int64), next(self._turns)) if len(tokens) else _EMPTY
        self._free[slot] = kept

    def forget(self) -> None:
        """Record that the free slots hold nothing that is known."""
        self._free = dict.fromkeys(sorted(self._free), _EMPTY)
