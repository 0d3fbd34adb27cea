"""A draft model: a smaller model guesses the next tokens of running choices, and one step of the target verifies them.

It has ranks, graphs and a cache of its own, in which a choice has the same slot as in the target's. It draws with the
parameters and the seed of the request: the sampler's noise is a function of seed and position alone, so the target
itself draws exactly one token behind a text, with which a guess is compared. What is accepted is what the target alone
answers, whether greedy or sampled; and both draw with the same noise, so they often agree.

A draft is made of single steps between two steps of the target, on the same cores. It pays if the tokens accepted of
late are worth more time than these steps and the verification take; else there are no drafts, but for a trial now and
then. What the draft has not read, such as a new prompt, it reads in pieces between the steps of others.

Sources: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023; Daliri, Musco
and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.tokenizer import TOKENIZER
from nxd_infer.runtime.rank_model import RankModel
from nxd_server.engine.rank_restarts import RankRestarts
from nxd_server.engine.request import Sequence as Generated
from nxd_server.engine.sampling_params import SAMPLER_DEFAULTS
from nxd_server.engine.scheduler import Row, Step
from nxd_server.engine.speculation import RETRY, Acceptance, Speculation, may_be_guessed, room
from nxd_server.engine.step_runner import Graph, StepCosts, StepRunner, Tensors
from nxd_server.engine.step_tensors import StepInputs, StepOutputs, check_buckets, tokens_input
from nxd_server.errors import log_failure
from nxd_server.text.tokenizer import Tokenizer

log = logging.getLogger("nxd_server.engine")

SLOWLY = 0.05
"""The weight of the newest guess in what is expected of the guesses for new requests."""
LONGEST_PAUSE = 1024
"""Most steps between two trials of guesses that did not pay."""


def check_draft(target: Manifest, draft: Manifest) -> None:
    """Raise ModelConfigError, with the fix, for an artifact that cannot guess for the ``target``."""
    theirs, ours = target.metadata, draft.metadata
    if ours.get("task") != "generate" or ours.get("encodes_prompts") or theirs.get("encodes_prompts"):
        raise ModelConfigError("draft: both artifacts must be of decoders, which continue their prompts")
    if ours["vocab_size"] != theirs["vocab_size"]:
        raise ModelConfigError(
            f"draft: its vocabulary has {ours['vocab_size']} tokens and the model's {theirs['vocab_size']}: give a "
            "model of the same family, with the same tokenizer"
        )
    for name, option in (("slots", "--slots"), ("bias_slots", "--bias-slots")):
        if (has := ours.get(name, 0)) < (needed := theirs.get(name, 0)):
            raise ModelConfigError(
                f"draft: it has {has} {name} and the model {needed}: trace the draft again with {option} {needed}"
            )
    if draft.world_size > target.world_size:
        raise ModelConfigError(
            f"draft: it has {draft.world_size} ranks and the model {target.world_size}, whose cores they share: trace "
            f"the draft again with --tp {target.tp_degree}"
        )
    _check_head(target, draft)
    check_buckets(draft.buckets, head="head" in ours)
    names = [{spec.name for bucket in one.buckets for spec in bucket.inputs} for one in (target, draft)]
    if missing := names[0] & SAMPLER_DEFAULTS.keys() - names[1] - {"adapter"}:
        raise ModelConfigError(f"draft: its graphs lack {', '.join(sorted(missing))}: trace the draft again")


def _check_head(target: Manifest, draft: Manifest) -> None:
    """Raise ModelConfigError for a head of another model, or of one whose graphs do not give what it reads."""
    head, given = draft.metadata.get("head"), target.metadata.get("hidden_states")
    if head is None:
        return
    kind = head["kind"]
    if given is None or given["kind"] != kind:
        gives = f"give those of {given['kind']}" if given else "give none"
        raise ModelConfigError(
            f"draft: it is an {kind} head, which reads the model's hidden states, and the model's graphs {gives}: "
            f"trace the model again with --hidden-states {kind}"
        )
    if given != head or target.files.get("config.json") != draft.files.get("config.json"):
        sizes = f"{head['features']} numbers for a token, and this one gives {given['features']}"
        why = sizes if given != head else "another config.json"
        raise ModelConfigError(
            f"draft: it was traced as the head of another model, with {why}: trace it again, with this model's "
            "directory as --head-of"
        )


def check_tokenizers(target: LoadedArtifact, draft: LoadedArtifact) -> None:
    """Raise ModelConfigError unless the tokens of both models stand for the same text."""
    files = target.manifest.files.get(TOKENIZER), draft.manifest.files.get(TOKENIZER)
    if None in files or files[0] == files[1]:
        return
    theirs, ours = (Tokenizer.from_dir(one).raw.get_vocab(with_added_tokens=True) for one in (target, draft))
    if different := sorted(theirs.items() ^ ours.items(), key=lambda pair: pair[1]):
        token, number = different[0]
        raise ModelConfigError(
            f"draft: {draft.path} has another vocabulary than {target.path}: token {number} is {token!r} in one of "
            "them alone; give a model with the same tokenizer"
        )


@dataclass(slots=True)
class _Read:
    """What a slot of the draft's cache holds: the first ``count`` tokens of ``sequence``, and then ``guesses``."""

    sequence: Generated
    count: int
    guesses: Sequence[int] = ()


@dataclass(slots=True)
class Fed(Row):
    """A row that feeds ``given``."""

    given: Sequence[int] = ()

    def tokens(self) -> list[int]:
        return list(self.given)


class DraftModel:
    """The ranks of a draft, and what their cache holds. The engine's thread alone calls it, except for :meth:`close`.

    Ranks that are lost are started again in a thread of their own; meanwhile the draft is not :attr:`ready`.
    """

    feeds_back: int | None = None  # what stands for the slot's last guess; None: that itself is fed

    def __init__(
        self, model: RankModel, target: Manifest, restarts: RankRestarts, costs: Mapping[str, float] | None = None
    ):
        """``model``: of the draft's artifact; its owner starts and ends it. ``target``: the manifest of the model that
        it guesses for. ``costs``: as for Engine. Raises ModelConfigError like :func:`check_draft`."""
        check_draft(target, model.manifest)
        meta, buckets = model.manifest.metadata, model.manifest.buckets
        self.model, self.max_len = model, int(meta["max_len"])
        self.ready = True
        self.graphs = sorted(
            (Graph(bucket.name, *tokens_input(bucket).shape) for bucket in buckets),
            key=lambda graph: (graph.length, graph.batch),
        )
        narrow = list({graph.length: graph for graph in reversed(self.graphs)}.values())[::-1]
        self._pieces = narrow[1:] or narrow  # single tokens only where there is nothing else
        self.costs = StepCosts(self.graphs, costs)
        self.steps = StepRunner(model, self.costs, self._padding)
        self.restarts = restarts
        left = ("adapter",)  # it has none of the target's
        self._inputs = {bucket.name: StepInputs(bucket, meta["slots"], model.arrays, left) for bucket in buckets}
        self._read: dict[int, Any] = {}
        self._closing = False

    # --- what it has read -------------------------------------------------------------------------------

    def behind(self, sequence: Generated) -> int:
        """Return how many tokens of ``sequence`` it has to read to guess the next one: at least the last."""
        assert sequence.slot is not None
        read = self._read.get(sequence.slot)
        if read is None or read.sequence is not sequence:
            count = 0
            if read is not None:
                before, now = read.sequence.tokens(0, read.count), sequence.tokens(0, read.count)
                pairs = enumerate(zip(before, now, strict=False))
                count = next((place for place, (a, b) in pairs if a != b), min(len(before), len(now)))
            read = self._read[sequence.slot] = _Read(sequence, count)
        guesses, read.guesses = read.guesses, ()
        for guess, token in zip(guesses, sequence.tokens(read.count, len(guesses)), strict=False):
            if guess != token:
                break
            read.count += 1
        read.count = min(read.count, sequence.known - 1)
        return sequence.known - read.count

    def free(self, sequence: Generated) -> int:
        """Return how many tokens after those of ``sequence`` it has room for; 0 if it cannot guess for it."""
        return max(0, self.max_len - sequence.known)

    def learn_hidden(self, row: Row, hidden: Any) -> None:
        """Take what the target's step gave for ``row``: hidden states [tokens, F] or more. Only a head wants them."""

    def drop_hidden(self, sequence: Generated) -> None:
        """Forget the hidden states of ``sequence`` that are unread: all, or if it has ended, unless they are few."""

    def forget(self, sequence: Generated) -> None:
        """Forget what was read of ``sequence``, or in its slot before."""
        here = sequence.slot
        self._read = {slot: one for slot, one in self._read.items() if slot != here and one.sequence is not sequence}

    def read_on(self, sequence: Generated, seconds: float) -> None:
        """Read what it is behind, but for the last token: one piece, the shortest if all take more than ``seconds``,
        and more while their time lasts."""
        while (missing := self.behind(sequence) - 1) > 0:
            able = [graph for graph in self._pieces if self.costs[graph.name] <= seconds] or self._pieces[:1]
            graph = next((graph for graph in able if graph.length >= missing), able[-1])
            start = sequence.known - 1 - missing
            given = sequence.tokens(start, min(missing, graph.length))
            self._feed(graph, [self._row(sequence, start, given)])
            self._keep(sequence, len(given))
            seconds -= self.costs[graph.name]
            if seconds < self.costs[self._pieces[0].name]:
                return

    def seconds_to_read(self, tokens: int) -> float:
        """Return how long it takes to read ``tokens`` of one sequence, at the best rate."""
        return tokens * min(self.costs[graph.name] / graph.length for graph in self._pieces)

    # --- guessing ---------------------------------------------------------------------------------------

    def guess(self, wanted: Sequence[tuple[Generated, int]]) -> list[list[int]]:
        """Return so many next tokens of each sequence, drawn one step after the other, all sequences in each."""
        sequences, counts = [sequence for sequence, _ in wanted], [count for _, count in wanted]
        starts = [sequence.known - self.behind(sequence) for sequence in sequences]
        given = [one.tokens(start, one.known - start) for one, start in zip(sequences, starts, strict=True)]
        guesses: list[list[int]] = [[] for _ in wanted]

        def feed(chosen: Sequence[int], most: int | None = None) -> list[int]:
            rows = [self._row(sequences[index], starts[index], given[index][:most]) for index in chosen]
            for index, row in zip(chosen, rows, strict=True):
                starts[index], given[index] = starts[index] + row.length, given[index][row.length :]
            return self._feed_all(rows)

        while (longest := max(map(len, given))) > 1:  # one by one, if that is faster than a step of so many
            late = [index for index, tokens in enumerate(given) if len(tokens) > 1]
            if self.seconds(len(given), longest) <= (longest - 1) * self.seconds(len(late)) + self.seconds(len(given)):
                break
            feed(late, 1)
        for place in range(max(counts)):
            active = [index for index, count in enumerate(counts) if count > place]
            for index, token in zip(active, feed(active), strict=True):
                guesses[index].append(token)
                given[index] = [token if self.feeds_back is None else self.feeds_back]
        for sequence, drawn in zip(sequences, guesses, strict=True):
            self._keep(sequence, self.behind(sequence), drawn[:-1])
        return guesses

    def _row(self, sequence: Generated, start: int, given: Sequence[int]) -> Fed:
        """Return the row that feeds ``given``, the tokens of ``sequence`` from ``start`` on."""
        return Fed(sequence, start, len(given), True, (), given)

    def _keep(self, sequence: Generated, tokens: int, guesses: Sequence[int] = ()) -> None:
        """Take note that it has read so many more ``tokens`` of ``sequence``, and then its own ``guesses``."""
        read = self._read[sequence.slot or 0]
        read.count, read.guesses = read.count + tokens, guesses

    def seconds(self, rows: int, length: int = 1) -> float:
        """Return what it takes to feed so many ``rows`` of up to ``length`` tokens; infinity if no graph does."""
        return min((cost for cost, _ in self._ways(rows, length)), default=inf)

    def _ways(self, rows: int, length: int) -> list[tuple[float, Graph]]:
        able = [graph for graph in self.graphs if graph.length >= length]
        return [(ceil(rows / graph.batch) * self.costs[graph.name], graph) for graph in able]

    def _feed_all(self, rows: Sequence[Fed]) -> list[int]:
        _, graph = min(self._ways(len(rows), max(row.length for row in rows)), key=lambda way: way[0])
        parts = range(0, len(rows), graph.batch)
        return [token for at in parts for token in self._feed(graph, rows[at : at + graph.batch])]

    def _feed(self, graph: Graph, rows: Sequence[Fed]) -> list[int]:
        """Run one step; return the token that is drawn after each row."""
        inputs, begin = self._inputs[graph.name], time.monotonic()
        for index, row in enumerate(rows):
            self._put(inputs, index, row)
        for index in range(len(rows), inputs.batch):
            inputs.clear(index)
        outputs = self.steps.timed(graph.name, inputs.tensors)[0]
        drawn = StepOutputs(outputs, inputs.batch).tokens
        self.costs.observe(graph.name, time.monotonic() - begin)  # with what this process does for it
        return [drawn[index][row.length - 1 if len(drawn[index]) > 1 else 0] for index, row in enumerate(rows)]

    def _put(self, inputs: StepInputs, index: int, row: Fed) -> None:
        inputs.put(index, row)

    # --- its ranks --------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run and measure graphs. Raises what keeps them from it."""
        self.steps.warm_up(None, lambda: not self._closing)

    def when_idle(self, probe: float | None) -> None:
        """Check that its ranks are there, and that they answer after ``probe`` seconds."""
        if not self.ready:
            return
        try:
            self.steps.check_alive()
            if probe is not None:
                self.steps.when_idle(probe)
        except Exception as error:
            self.lost(error)

    def lost(self, error: Exception) -> None:
        """Go on without the ranks, which are started again if that is allowed."""
        if self._closing:
            return
        self.ready = False
        self._read.clear()
        log_failure(log, "the draft model failed; answers go on without it", error)
        if refusal := self.restarts.refusal(excused=False):
            log.error("the draft model is not started again: %s", refusal)
            return
        threading.Thread(target=self._start_again, name="nxd-draft", daemon=True).start()

    def _start_again(self) -> None:
        failed = self.restarts.run(self._restart, False, lambda: "the engine ends" if self._closing else "")
        seconds = self.restarts.end()
        if failed is not None:
            if not self._closing:
                log.error("the draft model could not be started again: %s", failed[1])
        elif self._closing:
            self.model.close()
        else:
            self.ready = True
            log.info("the draft model guesses again after %.1f s", seconds)

    def _restart(self) -> None:
        self.steps.forget()
        self.model.restart()
        self.warm_up()

    def close(self) -> None:
        """Start its ranks no more; their owner ends them."""
        self._closing = True

    def _padding(self, name: str) -> Tensors:
        inputs = self._inputs[name]
        for index in range(inputs.batch):
            inputs.clear(index)
        return inputs.tensors


class DraftSpeculation(Speculation):
    """Adds the guesses of a draft model to decode steps if they pay."""

    def __init__(self, draft: DraftModel, graphs: Iterable[Graph], tokens: int, costs: StepCosts):
        """As for :class:`Speculation`."""
        super().__init__(graphs, tokens, costs)
        self.draft = draft
        self._rates: WeakKeyDictionary[Generated, Acceptance] = WeakKeyDictionary()
        self._all = Acceptance()
        self._left: WeakSet[Generated] = WeakSet()
        """Choices whose text is too long to be read for what is left of their answers."""
        self._pause = RETRY

    def put(self, step: Step) -> Step:
        graph = self._graphs.get(step.graph.batch)
        if not self.draft.ready:
            self.wants = False
        if step.kind != "decode" or graph is None or not self.draft.ready:
            return step
        try:
            return self._put(step, graph)
        except Exception as error:  # its ranks, or what they gave: the target's are another matter
            self.draft.lost(error)
            return step

    def saw(self, step: Step, outputs: Mapping[str, Any]) -> None:
        hidden = outputs.get("hidden")
        if hidden is None or not self.draft.ready:
            return
        for index, row in enumerate(step.rows):
            try:
                if may_be_guessed(row.sequence) and row.sequence not in self._left:
                    self.draft.learn_hidden(row, hidden[index])
            except Exception as error:  # of bookkeeping: the ranks are well
                self.draft.forget(row.sequence)
                log_failure(log, "hidden states for the draft model were lost; it begins anew", error)

    def ended(self, sequence: Generated) -> None:
        self.draft.drop_hidden(sequence)

    def _put(self, step: Step, graph: Graph) -> Step:
        draft, plain = self.draft, self._costs[step.graph.name]
        rooms = {row.sequence: self._room(row.sequence) for row in step.rows}
        wanted = [sequence for sequence, tokens in rooms.items() if tokens > 0]
        count, speed = self._best(step, graph, {one: rooms[one] for one in wanted})
        trial = bool(wanted) and not count
        if trial:
            self._passed += 1
            count = self._tokens if self._passed >= self._pause else 0
        self.wants = count > 0
        if not count or any(row.sequence.waits for row in step.rows):  # then the next one
            return step
        missing = {sequence: draft.behind(sequence) for sequence in wanted}
        late = [one for one in wanted if missing[one] > self._tokens + 1]
        for one in late if not trial else ():  # what reading costs is to be saved before the answer's longest end
            saved = (one.max_new_tokens - len(one.output)) * plain * (1 - 1 / speed)
            if draft.seconds_to_read(missing[one]) > saved:
                self._left.add(one)
                draft.drop_hidden(one)
        if late := [one for one in late if one not in self._left]:
            draft.read_on(first := min(late, key=missing.__getitem__), plain)
            missing[first] = draft.behind(first)
        ready = {one: rooms[one] for one in wanted if missing[one] <= self._tokens + 1}
        if not trial:
            count, _ = self._best(step, graph, ready)
        if not count or not ready:
            return step
        self._passed, self._pause = 0, min(2 * self._pause, LONGEST_PAUSE) if trial else RETRY
        drawn = draft.guess([(sequence, min(count, tokens)) for sequence, tokens in ready.items()])
        guesses = dict(zip(ready, drawn, strict=True))
        return self.verifying(graph, (replace(row, draft=tuple(guesses.get(row.sequence, ()))) for row in step.rows))

    def _room(self, sequence: Generated) -> int:
        return 0 if sequence in self._left else min(room(sequence, self._tokens), self.draft.free(sequence))

    def _best(self, step: Step, graph: Graph, rooms: dict[Generated, int]) -> tuple[int, float]:
        """Return how many guesses for these sequences give most tokens per second in this step, 0 if none do, and how
        many times as many these are as without."""
        if not rooms:
            return 0, 1.0
        each, rows = self.draft.seconds(len(rooms)), len(step.rows)

        def speed(count: int) -> float:
            right = sum(self.acceptance(one).expected(min(count, tokens)) for one, tokens in rooms.items())
            taken = self._costs[graph.name] + count * each
            return (1 + right / rows) * self._costs[step.graph.name] / taken

        best = max(range(1, self._tokens + 1), key=speed)
        return (best, speed(best)) if speed(best) > 1 else (0, 1.0)

    def acceptance(self, sequence: Generated) -> Acceptance:
        if sequence not in self._rates:
            self._rates[sequence] = Acceptance(self._all.rate)
        return self._rates[sequence]

    def learn(self, row: Row, right: int, tried: int) -> None:
        super().learn(row, right, tried)
        self._all.learn(right, tried, SLOWLY)
