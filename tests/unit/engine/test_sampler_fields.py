"""A number of the sampler is written once: it reaches the request's body, the parameters and the graphs from there."""

from __future__ import annotations

import numpy as np
import pytest

from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_server.engine import SamplingParams
from nxd_server.engine.core.scheduler import Row
from nxd_server.engine.core.sequence import Sequence
from nxd_server.engine.core.step_inputs import SAMPLER_DEFAULTS, StepInputs, sampler_of
from nxd_server.errors import RequestError
from nxd_server.http.openai.schemas import ChatBody, CompletionBody
from tests.support.engine.toy_model import VOCAB, ToyModel

BUCKET = ToyModel(ahead=True).manifest.bucket("decode_b2")
NAMES = {spec.name for spec in BUCKET.inputs}


def test_the_table_holds_what_the_sampler_takes():
    assert set(SAMPLER_FIELDS) == {
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
    }  # fmt: skip
    assert set(SAMPLER_FIELDS) <= NAMES


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
    sequence = Sequence(1, [1], params, 4, slot=0)
    inputs.put(0, Row(sequence, 0, 1, True), sampler_of(params, 0, NAMES, VOCAB, 4, ()))
    held = np.asarray(inputs.tensors[name])
    assert held[0] == np.float32(value) and held[1] == field.off == SAMPLER_DEFAULTS[name]
    with pytest.raises(RequestError, match=f"^{name}: the graphs of this artifact have no input '{name}'"):
        sampler_of(params.replace(temperature=params.temperature), 0, NAMES - {name}, VOCAB, 4, ())


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
