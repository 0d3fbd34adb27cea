"""The sampler against a naive one that sorts in float64, and its random numbers against chance."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer.ops import adjust_logits
from nxd_infer.ops.sampling import random_bits, truncation
from nxd_models.serving.sampling import LOGPROB_FLOOR, allowed_words, sample


def rows(**values):
    """Sampler settings as tensors, off unless given."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0} | values
    count = max(len(v) if isinstance(v, list) else 1 for v in settings.values())
    out = []
    for name, value in settings.items():
        dtype = torch.int64 if name in ("top_k", "seed", "position") else torch.float32
        out.append(torch.tensor(value if isinstance(value, list) else [value] * count, dtype=dtype))
    return out


def naive_support(logits, temperature, top_k, top_p, min_p):
    """The kept ids of one row, and those that are too close to a boundary to be decided by float32."""
    x = logits.double()
    scaled = (x - x.max()) / temperature
    order = sorted(range(len(x)), key=lambda i: -float(scaled[i]))
    kept = [i for i in order if scaled[i] > -math.inf]
    unsure: set[int] = set()
    if top_k > 0:
        bound = scaled[kept[min(top_k, len(kept)) - 1]]
        kept = [i for i in kept if scaled[i] >= bound]
    if top_p < 1:
        p = torch.stack([scaled[i] for i in kept]).exp()
        p = p / p.sum()
        running, bound = 0.0, None
        for i, share in zip(kept, p.tolist(), strict=True):
            running += share
            if abs(running - top_p) < 1e-6:
                unsure.update(kept)
            if running >= top_p:
                bound = scaled[i]
                break
        bound = scaled[kept[-1]] if bound is None else bound
        kept = [i for i in kept if scaled[i] >= bound]
    if min_p > 0:
        limit = math.log(min_p)
        unsure.update(i for i in kept if abs(float(scaled[i]) - limit) < 1e-5)
        kept = [i for i in kept if scaled[i] >= limit]
    return set(kept), unsure


@settings(max_examples=100)
@given(
    vocabulary=st.integers(1, 60),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    spread=st.sampled_from([0.0, 0.5, 4.0, 40.0]),
    ties=st.booleans(),
    absent=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_the_kept_tokens_are_those_of_the_naive_sampler(
    vocabulary, temperature, top_k, top_p, min_p, spread, ties, absent, seed
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocabulary, generator=generator) * spread
    if ties:
        logits = logits.round()
    if absent and vocabulary > 1:
        logits[0, torch.rand(vocabulary, generator=generator) < 0.3] = -math.inf
        logits[0, 0] = 1.0
    cost = (logits.amax(-1, keepdim=True) - logits) / torch.tensor(temperature)
    _, k, p, m, _, _ = rows(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = set(truncation(cost, k, p, m)[0].nonzero().flatten().tolist())
    expected, unsure = naive_support(logits[0], temperature, top_k, min(max(top_p, 0.0), 1.0), min_p)
    assert kept - unsure == expected - unsure
    assert kept, "no setting leaves nothing to choose from"


def chi_square_limit(freedom):
    """The value that chance exceeds once in 10,000 times (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.5, "min_p": 0.1}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}], ids=str
)
def test_draws_follow_the_truncated_distribution(options):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    draws = 2000
    settings = rows(**{**options, "seed": list(range(draws)), "position": 17})
    token = sample(logits.expand(draws, -1).contiguous(), *settings)[0]
    temperature = options.get("temperature", 1.0)
    kept, _ = naive_support(
        logits, temperature, options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0)
    )
    p = torch.zeros(12, dtype=torch.float64)
    for i in kept:
        p[i] = math.exp(float(logits[i]) / temperature)
    expected = p / p.sum() * draws
    observed = token.bincount(minlength=12).double()
    assert not observed[p == 0].any(), "a token outside the support was drawn"
    live = p > 0
    statistic = ((observed - expected)[live] ** 2 / expected[live]).sum().item()
    assert statistic < chi_square_limit(int(live.sum()) - 1)


def test_random_bits_are_pinned():
    """A seed gives the same text in every version: changing these numbers changes users' results."""
    assert random_bits(torch.tensor([0, 1, -1]), torch.tensor([0, 5, 2**31]), 3).tolist() == [
        [2426169757, 905194977, 1804863890],
        [3715219956, 4196768173, 1776617492],
        [322541313, 2248330213, 3933182191],
    ]


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-40, -1.0, float("nan")])
def test_no_temperature_or_next_to_none_is_greedy(temperature):
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0]])
    token, logprob, ids, values = sample(logits, *rows(temperature=temperature, top_k=3, seed=9))
    assert token.item() == 1, "the first of equals"
    expected = logits.log_softmax(-1)[0]
    torch.testing.assert_close(logprob[0], expected[1])
    assert ids[0, 4:].tolist() == [-1] * 16
    assert values[0, 4:].tolist() == [LOGPROB_FLOOR] * 16
    assert sorted(ids[0, :4].tolist()) == [0, 1, 2, 3]


def test_damaged_logits_harm_their_own_row_only():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(9))
    settings = rows(temperature=[1.0] * 5, seed=[1, 2, 3, 4, 5])
    clean = sample(logits, *settings)
    broken = logits.clone()
    broken[0] = float("nan")
    broken[1, 3] = float("inf")
    broken[2, ::2] = float("nan")
    broken[3] = -float("inf")
    token, logprob, ids, values = sample(broken, *settings)
    assert token[4] == clean[0][4]
    assert token[1] == 3, "plus infinity wins"
    assert token[2] % 2 == 1, "a NaN token is never chosen"
    assert ((token >= 0) & (token < 40)).all()
    assert logprob.isfinite().all()
    assert values.isfinite().all()
    assert ((ids >= 0) & (ids < 40)).all()


def pack_allowed(allowed_BV: torch.Tensor) -> torch.Tensor:
    """Pack bool [B, V] into the bitmask that sample() takes."""
    rows, vocabulary = allowed_BV.shape
    words = allowed_words(vocabulary)
    padded = torch.nn.functional.pad(allowed_BV.long(), (0, words * 32 - vocabulary))
    value = (padded.view(rows, words, 32) << torch.arange(32)).sum(-1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


def test_log_probabilities_are_of_the_raw_distribution():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(10)) * 3
    allowed = torch.zeros(1, 50, dtype=torch.bool)
    allowed[0, 7] = True
    token, logprob, ids, values = sample(
        logits,
        *rows(temperature=0.3, top_k=2, top_p=0.4),
        pack_allowed(allowed),
        torch.tensor([[7, 60]]),
        torch.tensor([[5.0, 9.0]]),
    )
    assert token.item() == 7
    expected = logits.double().log_softmax(-1)[0]
    assert abs(logprob.item() - expected[7].item()) < 1e-5
    best = expected.topk(20)
    assert ids[0].tolist() == best.indices.tolist()
    torch.testing.assert_close(values[0].double(), best.values, atol=1e-5, rtol=0)


def naive_adjust(logits, counts, seen, repetition, presence, frequency, bias, allowed):
    out = []
    for i, x in enumerate(logits.tolist()):
        if seen[i] or counts[i]:
            x = x / repetition if x > 0 else x * repetition
        x -= presence * (counts[i] > 0) + frequency * counts[i]
        x += sum(value for token, value in bias if token == i)
        out.append(x if allowed[i] else -math.inf)
    return torch.tensor(out)


def test_penalties_bias_and_mask_in_their_order():
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(3, 45, generator=generator) * 3
    counts = torch.randint(0, 3, (3, 45), generator=generator, dtype=torch.int32)
    seen = torch.rand(3, 45, generator=generator) < 0.3
    allowed = torch.rand(3, 45, generator=generator) < 0.8
    ids = torch.tensor([[3, 3, 0], [44, 45, -1], [1, 2, 7]])
    values = torch.tensor([[1.0, 2.0, 0.0], [-3.0, 100.0, 100.0], [0.5, -100.0, 100.0]])
    penalties = {"repetition": [1.0, 1.3, 0.8], "presence": [0.5, 0.0, -1.0], "frequency": [0.0, 0.3, 2.0]}
    found = adjust_logits(
        logits,
        pack_allowed(allowed),
        ids,
        values,
        counts=counts,
        seen=seen,
        **{f"{name}_penalty": torch.tensor(value) for name, value in penalties.items()},
    )
    for row in range(3):
        bias = list(zip(ids[row].tolist(), values[row].tolist(), strict=True))
        own = {name: value[row] for name, value in penalties.items()}
        expected = naive_adjust(logits[row], counts[row].tolist(), seen[row], bias=bias, allowed=allowed[row], **own)
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-5)


def test_the_bitmask_covers_every_token():
    for vocabulary in (1, 31, 32, 33, 64, 100):
        allowed = torch.rand(4, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) < 0.5
        packed = pack_allowed(allowed)
        assert packed.shape == (4, allowed_words(vocabulary))
        assert packed.dtype == torch.int32
        assert torch.equal(adjust_logits(torch.zeros(4, vocabulary), packed) == 0, allowed)
    everything = torch.full((1, 4), -1, dtype=torch.int32)
    assert (adjust_logits(torch.zeros(1, 100), everything) == 0).all()
