"""Random calls of the sampling operators, and how near to the references their results must be."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from nxd_infer import ops
from nxd_infer.ops.sampling import LOGPROB_FLOOR, finite_or_absent

NAN, INF = float("nan"), float("inf")
TEMPERATURES = [0.0, 0.0, 1e-6, 0.05, 0.7, 1.0, 1.0, 1.3, 40.0, 1e30, INF, -1.0, 1e-45, NAN]
TOP_K = [0, 0, -3, 1, 2, 7, 50, 700, 10**12]
TOP_P = [1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999, 2.0, -1.0, NAN]
MIN_P = [0.0, 0.0, 0.01, 0.2, 1.0, 3.0, 1e-45, NAN]
KINDS = ["plain", "plain", "flat", "peaked", "ties", "absent", "damaged", "huge"]


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


def plain(library: Any) -> Any:
    """The operator without any adjustments."""
    return lambda *arguments: library.op("sample_adjusted")(*arguments, *[None] * 9)


def many_results(library: Any) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """Results of rows of every kind and setting, with their logits."""
    found = []
    for seed, kind in enumerate(sorted(set(KINDS))):
        draw = Draw(seed)
        raw, wishes = draw.logits(40, 2049, kind), draw.settings(40)
        adjustments = draw.adjustments(40, 2049)
        found.append((raw, library.op("sample_adjusted")(raw, *wishes, 20, *adjustments)))
        found.append((raw, plain(library)(raw, *wishes, 20)))
    return found


def digest(library: Any) -> str:
    """Of every bit of :func:`many_results`."""
    content = hashlib.sha256()
    for _, results in many_results(library):
        for tensor in results:
            content.update(tensor.numpy().tobytes())
    return content.hexdigest()


class Sampler(torch.nn.Module):
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
        drawn = ops.sample_adjusted(x, *wishes)
        history = {"counts": self.counts, "seen": self.seen, "slot": slot, "presence_penalty": presence}
        return (*drawn, *ops.sample_adjusted(x, *wishes, **history))


def sampler() -> tuple[torch.nn.Module, dict[Any, int]]:
    return Sampler(), {}
