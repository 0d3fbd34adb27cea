"""Sampling parameters: ranges by field, harmless forms accepted, nothing that would hurt a graph let through. A number
of the sampler is written once: it reaches the request's body, the parameters and the graphs from there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_server.engine import SamplingParams
from nxd_server.engine.request import derive_seed
from nxd_server.engine.sampling_params import SAMPLER_DEFAULTS, sampler_of
from nxd_server.engine.scheduler import Row
from nxd_server.engine.step_tensors import StepInputs
from nxd_server.errors import RequestError
from nxd_server.http.openai.schemas import ChatBody, CompletionBody
from tests.support.engine.schedules import sequence
from tests.support.engine.toy_model import VOCAB, ToyModel

BUCKET = ToyModel(ahead=True).manifest.bucket("decode_b2")
NAMES = {spec.name for spec in BUCKET.inputs}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", "1"), ("temperature", True), ("temperature", None), ("temperature", 10**400),
        ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.01), ("repetition_penalty", 0),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.5), ("seed", "x"),
        ("n", 0), ("n", 129), ("n", None), ("logprobs", -1), ("logprobs", True),
        ("min_tokens", -1), ("min_tokens", 17), ("ignore_eos", 1), ("ignore_eos", None),
        ("stop", [""]), ("stop", [1]), ("stop", 5), ("stop", ["x"] * 17), ("stop", ["x" * 1025]),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["1"]), ("stop_token_ids", 3),
        ("logit_bias", {"a": 1}), ("logit_bias", {1: 101}), ("logit_bias", {1: "x"}), ("logit_bias", [1]),
        ("bad_words", [letter * 1000 for letter in "abcdefghi"]), ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [True]), ("logit_bias", {-1: 1}),
        ("logit_bias", {"1" * 25: 1}), ("logit_bias", {1: math.nan}),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_field(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field and field in str(caught.value)


@pytest.mark.parametrize("name", SAMPLER_FIELDS)
def test_limits_are_those_of_the_table_and_only_counts_keep_guesses_away(name):
    field = SAMPLER_FIELDS[name]
    with pytest.raises(RequestError, match=f"^{name}: must be") as caught:
        SamplingParams(**{name: field.minimum - 1})
    assert caught.value.field == name
    if field.maximum is not None:
        with pytest.raises(RequestError, match=f"^{name}: must be a number from"):
            SamplingParams(**{name: field.maximum + 1})
    value = 3 if field.kind is int else 0.25
    assert SamplingParams(**{name: value}).penalised == field.uses_history and not SamplingParams().penalised


@pytest.mark.parametrize("name", SAMPLER_FIELDS)
def test_a_number_of_a_request_reaches_the_graph(name):
    field = SAMPLER_FIELDS[name]
    value = 3 if field.kind is int else 0.25
    for kind, more in ((CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": []})):
        params = kind.parse({**more, name: value}).sampling(4, None, {})
        assert getattr(params, name) == value and value not in (field.off, getattr(SamplingParams(), name))
        own = kind.parse(more).sampling(4, None, {name: value} if field.model_may_set else {})
        assert getattr(own, name) == (value if field.model_may_set else getattr(SamplingParams(), name))
        described = kind.model_json_schema()["properties"][name]
        assert ("the model's own" in described.get("description", "")) == field.model_may_set
    inputs = StepInputs(BUCKET, 4, True)
    inputs.put(0, Row(sequence(1, [1], 4, params, sampler_of(params, 0, NAMES, VOCAB, 4, ()), slot=0), 0, 1, True))
    held = np.asarray(inputs.tensors[name])
    assert held[0] == np.float32(value) and held[1] == field.off == SAMPLER_DEFAULTS[name]
    with pytest.raises(RequestError, match=f"^{name}: the graphs of this artifact have no input '{name}'"):
        sampler_of(params.replace(temperature=params.temperature), 0, NAMES - {name}, VOCAB, 4, ())


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
    assert SamplingParams(allowed_token_ids=(3, 1.0, 3)).allowed_token_ids == [3, 1]
    assert params.replace(n=2).n == 2
    with pytest.raises(RequestError):
        params.replace(n=0)


@pytest.mark.parametrize("tiny", [5e-324, 1e-310, 1e-45, 1e-38, 9.9e-5])
def test_subnormal_numbers_never_reach_a_graph(tiny):
    params = SamplingParams(temperature=tiny, top_p=tiny, min_p=tiny)
    assert params.temperature == 0.0 and params.greedy
    assert params.top_p >= 1e-6 and (params.min_p == 0.0 or params.min_p >= 1e-30)
    assert SamplingParams(top_p=0).top_p == 1e-6


def test_derived_seeds_differ_and_stay_in_range():
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        seeds = [derive_seed(seed, index) for index in range(100)]
        assert seeds[0] == seed and len(set(seeds)) == 100
        assert all(-(2**63) <= derived < 2**63 for derived in seeds)
