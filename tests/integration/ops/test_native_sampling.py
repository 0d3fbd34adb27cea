"""The native sampling operators against their references: the same tokens for every setting, the same bits anywhere."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxd_infer import native, ops
from nxd_infer.ops.sampling import LOGPROB_FLOOR, exp_negative, finite_or_absent
from nxd_infer.trace import parallel_model_trace
from tests.support.needs import needs_native
from tests.support.ops.levels import run_at

pytestmark = needs_native

LEVELS = ("portable", "avx2", "avx512")
"""Higher levels of the processor use the loops of the last one."""
NAN, INF = float("nan"), float("inf")
SAMPLE: Any = ops.sample_reference
SAMPLE_ADJUSTED: Any = ops.sample_adjusted_reference
TEMPERATURES = [0.0, 0.0, 1e-6, 0.05, 0.7, 1.0, 1.0, 1.3, 40.0, 1e30, INF, -1.0, 1e-45, NAN]
TOP_K = [0, 0, -3, 1, 2, 7, 50, 700, 10**12]
TOP_P = [1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999, 2.0, -1.0, NAN]
MIN_P = [0.0, 0.0, 0.01, 0.2, 1.0, 3.0, 1e-45, NAN]
VOCABULARIES = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 500, 1000, 2049, 5000]))
KINDS = ["plain", "plain", "flat", "peaked", "ties", "absent", "damaged", "huge"]


@pytest.fixture(scope="module")
def library() -> Any:
    return native.load()


class Draw:
    """Random choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def logits(self, rows: int, vocabulary: int, kind: str) -> Tensor:
        x = torch.randn(rows, vocabulary, generator=self.generator)
        if kind == "peaked":
            x = x * 3 + 12 * self.some(rows, vocabulary, share=0.02)
        elif kind == "ties":
            x = (x * 2).round()
        elif kind == "absent":
            x[self.some(rows, vocabulary, share=0.7)] = -INF
        elif kind == "damaged":
            for value in (NAN, INF, -INF, 3e38, -3e38, -0.0, 0.0, 1e-42):
                x[self.some(rows, vocabulary, share=0.1)] = value
            x[self.some(rows, 1, share=0.3)[:, 0]] = -INF
            x[self.some(rows, 1, share=0.1)[:, 0]] = NAN
        elif kind == "huge":
            x = x * 60
        return x if kind != "flat" else x * 1e-3

    def some(self, rows: int, vocabulary: int, share: float) -> Tensor:
        return torch.rand(rows, vocabulary, generator=self.generator) < share

    def of(self, values: list[Any], rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=self.generator)]

    def settings(self, rows: int) -> list[Tensor]:
        seed, position = torch.randint(-(2**62), 2**62, (2, rows), generator=self.generator)
        top_k = self.of(TOP_K, rows, torch.int64)
        return [self.of(TEMPERATURES, rows), top_k, self.of(TOP_P, rows), self.of(MIN_P, rows), seed, position]

    def adjustments(self, rows: int, vocabulary: int) -> list[Tensor]:
        """As :func:`ops.adjust_logits` takes them; about half of each kind is off."""
        words = torch.randint(-(2**31), 2**31, (rows, (vocabulary + 31) // 32), generator=self.generator)
        words[self.some(rows, 1, share=0.5)[:, 0]] = -1
        bias_ids = torch.randint(-2, vocabulary + 2, (rows, 5), generator=self.generator)
        bias = torch.randn(rows, 5, generator=self.generator) * 4 * self.some(rows, 1, share=0.5)
        counts = torch.randint(1, 9, (rows + 2, vocabulary), generator=self.generator, dtype=torch.int32)
        counts *= self.some(rows + 2, vocabulary, share=0.3)
        seen = self.some(rows + 2, vocabulary, share=0.3)
        slot = torch.randperm(rows + 2, generator=self.generator)[:rows]
        presence, frequency = self.of([0.0, 0.7, -1.0], rows), self.of([0.0, 0.3, -0.1], rows)
        repetition = self.of([1.0, 1.3, 0.8], rows)
        return [words.int(), bias_ids, bias, counts, seen, slot, presence, frequency, repetition]


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], raw: Tensor) -> None:
    """Tokens and ids equal; log probabilities within rounding of the log-softmax in float64."""
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    token, logprob, ids, values = found
    assert torch.equal(token, expected[0]), (token, expected[0])
    assert torch.equal(ids, expected[2])
    wide = finite_or_absent(raw).double()
    total = wide.logsumexp(-1, keepdim=True).clamp(min=-1e300)
    exact = (wide - total).clamp(min=LOGPROB_FLOOR)
    torch.testing.assert_close(logprob.double(), exact.gather(-1, token[:, None])[:, 0], atol=1e-6, rtol=2e-7)
    exact = torch.where(ids >= 0, exact.gather(-1, ids.clamp(min=0)), LOGPROB_FLOOR)
    torch.testing.assert_close(values.double(), exact, atol=1e-6, rtol=2e-7)


@settings(max_examples=80)
@given(
    st.integers(1, 40),
    VOCABULARIES,
    st.sampled_from(KINDS),
    st.sampled_from([20, 20, 0, 1, 130]),
    st.integers(0, 2**40),
)
def test_tokens_are_those_of_the_reference(library, rows, vocabulary, kind, top, seed):
    draw = Draw(seed)
    raw = draw.logits(rows, vocabulary, kind)
    logits = raw if draw.some(1, 1, share=0.5) else draw.logits(rows, vocabulary, kind)
    wishes = draw.settings(rows)
    check(library.op("sample")(logits, raw, *wishes, top), SAMPLE(logits, raw, *wishes, top), raw)


@settings(max_examples=80)
@given(
    st.integers(1, 12), VOCABULARIES, st.sampled_from(KINDS), st.lists(st.booleans(), min_size=7), st.integers(0, 2**40)
)
def test_adjusted_tokens_are_those_of_the_reference(library, rows, vocabulary, kind, given_, seed):
    draw = Draw(seed)
    raw, wishes = draw.logits(rows, vocabulary, kind), draw.settings(rows)
    allowed, bias_ids, bias, counts, seen, slot, *penalties = draw.adjustments(rows, vocabulary)
    history = [counts if given_[1] else None, seen if given_[2] else None, slot]
    if given_[3]:
        history = [None if line is None else line[:rows].contiguous() for line in history[:2]] + [None]
    biases = [bias_ids, bias] if given_[4] else [None, None]
    rest = [p if given_[5] else None for p in penalties]
    adjustments = [allowed if given_[0] else None, *biases, *history, *rest]
    found = library.op("sample_adjusted")(raw, *wishes, 20, *adjustments)
    check(found, SAMPLE_ADJUSTED(raw, *wishes, 20, *adjustments), raw)


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 30), st.integers(0, 2**40))
def test_tokens_are_remembered_as_by_the_reference(library, rows, steps, vocabulary, seed):
    draw = Draw(seed)
    _, _, _, counts, seen, slot, *_ = draw.adjustments(rows, vocabulary)
    ids = torch.randint(vocabulary, (rows, steps), generator=draw.generator)
    length = torch.randint(steps + 1, (rows,), generator=draw.generator)
    if seed % 2:
        slot[:] = slot[0]  # rows of one sequence
    slot = torch.where((length == 0) | (slot == rows + 1), rows + 1, slot)  # the last line is for idle rows
    length = torch.where(slot == rows + 1, 0, length)
    start = draw.of([0, 3], rows, torch.int64)
    step = (ids, draw.some(rows, steps, share=0.5), start, length, slot)
    expected = counts.clone(), seen.clone()
    ops.remember_tokens_reference(*expected, *step)
    library.op("remember_tokens")(counts, seen, *step)
    assert torch.equal(counts[:-1], expected[0][:-1])
    assert torch.equal(seen[:-1], expected[1][:-1])


def many_results(library: Any) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """Results of rows of every kind and setting, with their logits."""
    found = []
    for seed, kind in enumerate(sorted(set(KINDS))):
        draw = Draw(seed)
        raw, wishes = draw.logits(40, 2049, kind), draw.settings(40)
        adjustments = draw.adjustments(40, 2049)
        found.append((raw, library.op("sample_adjusted")(raw, *wishes, 20, *adjustments)))
        found.append((raw, library.op("sample")(raw, raw, *wishes, 20)))
    return found


def digest(library: Any) -> str:
    """Of every bit of :func:`many_results`."""
    content = hashlib.sha256()
    for _, results in many_results(library):
        for tensor in results:
            content.update(tensor.numpy().tobytes())
    return content.hexdigest()


@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_gives_the_same_bits(library, level):
    code = "from tests.ops import test_native_sampling as t; print(t.digest(native.load()))"
    assert run_at(library, level, code, threads=1) == digest(library)


def test_a_row_depends_neither_on_threads_nor_on_its_batch(library):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = digest(library)
        torch.set_num_threads(2)
        assert digest(library) == one
    finally:
        torch.set_num_threads(before)
    draw = Draw(3)
    raw, wishes = draw.logits(40, 2049, "plain"), draw.settings(40)
    together = library.op("sample")(raw, raw, *wishes, 20)
    for row in (0, 7, 39):
        alone = library.op("sample")(raw[row : row + 1], raw[row : row + 1], *(w[row : row + 1] for w in wishes), 20)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[row])


def test_a_real_vocabulary(library):
    """More blocks than a histogram has bins, and every way of truncating."""
    draw = Draw(11)
    for kind in ("plain", "peaked", "flat"):
        raw, wishes = draw.logits(8, 151_937, kind), draw.settings(8)
        wishes[0][:] = 1.0
        wishes[1][:4] = torch.tensor([0, 50, 3000, 100_000])
        check(library.op("sample")(raw, raw, *wishes, 20), SAMPLE(raw, raw, *wishes, 20), raw)


def test_the_exponential_is_as_exact_as_it_says():
    x = -torch.cat([torch.linspace(0, 87, 400_001), torch.rand(100_000, generator=torch.Generator().manual_seed(1))])
    x = x[x > -87]
    error = (exp_negative(x).double() / x.double().exp() - 1).abs().max().item()
    assert error < 1.2e-7
    assert exp_negative(torch.tensor([0.0, -87.0, -INF])).tolist() == [1.0, 0.0, 0.0]


def test_strides_and_empty_batches(library):
    draw = Draw(5)
    wide, wishes = draw.logits(6, 300, "plain"), draw.settings(6)
    raw = wide[:, ::2]
    check(library.op("sample")(raw, raw, *wishes, 20), SAMPLE(raw, raw, *wishes, 20), raw)
    none, wishes = wide[:0], [w[:0] for w in wishes]
    history = [torch.zeros(3, 300, dtype=dtype) for dtype in (torch.int32, torch.bool)]
    slot = torch.zeros(0, dtype=torch.int64)
    for token, _, ids, _ in (
        library.op("sample")(none, none, *wishes, 20),
        library.op("sample_adjusted")(none, *wishes, 20, None, None, None, *history, slot, None, None, None),
    ):
        assert token.shape == (0,) and ids.shape == (0, 20)


def test_what_does_not_fit_is_refused(library):
    draw = Draw(6)
    raw, wishes = draw.logits(2, 40, "plain"), draw.settings(2)
    adjustments = draw.adjustments(2, 40)
    sample, adjusted, remember = (library.op(name) for name in ("sample", "sample_adjusted", "remember_tokens"))
    with pytest.raises(RuntimeError, match="logits has dtype number"):
        sample(raw.double(), raw, *wishes, 20)
    with pytest.raises(RuntimeError, match=r"top_k has .* expected .* shape \[2\]"):
        sample(raw, raw, wishes[0], wishes[1][:1], *wishes[2:], 20)
    with pytest.raises(RuntimeError, match="not \\[rows, vocabulary\\]"):
        sample(raw[0], raw[0], *wishes, 20)
    with pytest.raises(RuntimeError, match="top = -1"):
        sample(raw, raw, *wishes, -1)
    adjustments[5] = torch.tensor([0, 4])
    with pytest.raises(RuntimeError, match="slot 4 is not one of 4"):
        adjusted(raw, *wishes, 20, *adjustments)
    for absent in (1, 2):
        with pytest.raises(RuntimeError, match="bias_ids and bias_values come together"):
            adjusted(raw, *wishes, 20, *(None if place == absent else x for place, x in enumerate(adjustments)))
    counts, seen = adjustments[3], adjustments[4]
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="token 40 is not one of 40"):
        remember(counts, seen, torch.tensor([[40]]), torch.tensor([[True]]), one, one, one)


class Step(torch.nn.Module):
    """What a decoder does after its last layer: counts in a state, then the draw."""

    counts: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(3, 50, dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(3, 50, dtype=torch.bool))

    def forward(self, x: Tensor, ids: Tensor, *wishes: Any) -> tuple[Tensor, ...]:
        slot, ones = torch.arange(2), torch.ones_like(ids[:, 0])
        ops.remember_tokens(self.counts, self.seen, ids, ids >= 0, ones, ones, slot)
        presence = torch.full((2,), 5.0)
        plain = ops.sample(x, x, *wishes)
        history = {"counts": self.counts, "seen": self.seen, "slot": slot, "presence_penalty": presence}
        return (*plain, *ops.sample_adjusted(x, *wishes, **history))


def step() -> tuple[torch.nn.Module, dict[Any, int]]:
    return Step(), {}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_traced_graph_draws_as_the_module_does(backend):
    draw = Draw(8)
    wishes = draw.settings(2)
    wishes[0][:] = torch.tensor([0.0, 1.0])
    calls = [(draw.logits(2, 50, "plain"), torch.tensor([[i], [i + 1]]), *wishes) for i in range(4)]
    module, _ = step()
    arguments = {"tp_degree": 1, "checkpoint_loader_callable": dict, "inline_weights_to_neff": False}
    with parallel_model_trace(step, calls[0], backend=backend, **arguments) as model:
        model.reset_states()
        (ir,) = model.artifact.path.rglob("program.json")
        operators = ir.read_text()
        for name in ("sample", "sample_adjusted", "remember_tokens"):
            assert re.search(rf"nxd_[0-9a-f]{{8}}\.{name}\.default", operators), "the native operator is in the graph"
        for call in calls:
            for found, expected in zip(model(*call), module(*call), strict=True):
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
