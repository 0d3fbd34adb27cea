"""Sampling parameters: ranges by field, harmless forms accepted, nothing that would hurt a graph let through."""

from __future__ import annotations

import math

import pytest

from nxd_server.engine import SamplingParams
from nxd_server.engine.core.sequence import derive_seed
from nxd_server.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", "1"), ("temperature", True), ("temperature", None), ("temperature", 10**400),
        ("top_p", -0.1), ("top_p", 1.1), ("top_p", math.nan), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.01),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.5), ("seed", "x"),
        ("n", 0), ("n", 129), ("n", None), ("logprobs", -1), ("logprobs", True),
        ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("repetition_penalty", 0), ("repetition_penalty", -1),
        ("min_tokens", -1), ("min_tokens", 17), ("ignore_eos", 1), ("ignore_eos", None),
        ("stop", [""]), ("stop", [1]), ("stop", 5), ("stop", ["x"] * 17), ("stop", ["x" * 1025]),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["1"]), ("stop_token_ids", 3),
        ("logit_bias", {"a": 1}), ("logit_bias", {1: 101}), ("logit_bias", {1: "x"}), ("logit_bias", [1]),
        ("logit_bias", {-1: 1}), ("logit_bias", {"1" * 25: 1}), ("logit_bias", {1: math.nan}),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_field(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field and field in str(caught.value)


def test_a_name_that_is_none_is_told_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"no parameter .tempature.; did you mean temperature\?"):
        SamplingParams(tempature=0)
    with pytest.raises(TypeError, match=r"no parameter .zzz.$"):
        SamplingParams().replace(zzz=0)


def test_accepted_forms_become_one_form():
    params = SamplingParams(
        stop="END", top_k=-1, max_tokens=None, logit_bias={"5": 1}, temperature=1, seed=3.0, stop_token_ids=(1, 2)
    )
    assert params.stop == ["END"] and params.top_k == 0 and params.logit_bias == {5: 1.0}
    assert params.temperature == 1.0 and params.seed == 3 and params.stop_token_ids == [1, 2]
    assert SamplingParams(stop=None, logit_bias=None, stop_token_ids=None).stop == []
    assert params.replace(n=2).n == 2
    with pytest.raises(RequestError):
        params.replace(n=0)


@pytest.mark.parametrize("tiny", [5e-324, 1e-310, 1e-45, 1e-38, 9.9e-5])
def test_subnormal_numbers_never_reach_a_graph(tiny):
    params = SamplingParams(temperature=tiny, top_p=tiny, min_p=tiny)
    assert params.temperature == 0.0 and params.greedy
    assert params.top_p >= 1e-6
    assert params.min_p == 0.0 or params.min_p >= 1e-30
    assert SamplingParams(top_p=0).top_p == 1e-6


def test_derived_seeds_differ_and_stay_in_range():
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        seeds = [derive_seed(seed, index) for index in range(100)]
        assert seeds[0] == seed and len(set(seeds)) == 100
        assert all(-(2**63) <= derived < 2**63 for derived in seeds)
