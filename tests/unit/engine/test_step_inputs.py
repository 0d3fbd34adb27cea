"""The inputs of a step, written number by number, against arrays that are written anew for every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer.errors import InputRangeError, ModelConfigError
from nxd_server.engine.request import Sequence
from nxd_server.engine.sampling_params import SAMPLER_DEFAULTS, Sampler, SamplingParams, sampler_of
from nxd_server.engine.scheduler import Row
from nxd_server.engine.step_tensors import StepInputs, check_buckets
from tests.support.engine import schedules
from tests.support.engine.toy_model import VOCAB, ToyModel

SLOTS, LONGEST = 4, 64
LIMITS = {
    "tokens": (-1, VOCAB - 1),
    "start": (0, LONGEST - 1),
    "length": (0, LONGEST),
    "block_table": (0, SLOTS),
    "bias_ids": (0, VOCAB - 1),
    "adapter": (0, 2),
}


def limited(bucket):
    """``bucket`` with the limits that traced decoders have, and the input of those with adapters."""
    seed = next(spec for spec in bucket.inputs if spec.name == "seed")
    inputs = []
    for spec in [*bucket.inputs, seed.model_copy(update={"name": "adapter", "default": 0})]:
        low, high = LIMITS.get(spec.name, (None, None))
        inputs.append(spec.model_copy(update={"minimum": low, "maximum": high}))
    return bucket.model_copy(update={"inputs": inputs})


BUCKETS = {bucket.name: limited(bucket) for bucket in ToyModel(slots=SLOTS, max_len=LONGEST, ahead=True).buckets}
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, seed=3),
    SamplingParams(logit_bias={3: 1.5, 9: -2.0}),
    SamplingParams(min_tokens=4),
)


NAMES = {spec.name for spec in BUCKETS["decode_b1"].inputs}


def sequence(identity: int, prompt: list[int], kind: int, slot: int, sampler: Sampler | None = None) -> Sequence:
    own = sampler or sampler_of(KINDS[kind], 3, NAMES, VOCAB, 4, (1,))
    return schedules.sequence(identity, prompt, 40, KINDS[kind], own, slot=slot)


@st.composite
def steps(draw):
    """Steps of one bucket: which row holds which of a few sequences at which place, or nothing."""
    bucket = BUCKETS[draw(st.sampled_from(sorted(BUCKETS)))]
    batch, length = bucket.inputs[0].shape
    row = st.tuples(st.integers(1, 5), st.integers(0, 20), st.integers(1, length))
    return bucket, draw(st.lists(st.lists(st.none() | row, min_size=batch, max_size=batch), min_size=1, max_size=6))


@settings(max_examples=100)
@given(steps(), st.booleans())
def test_rows_hold_what_arrays_written_anew_would(case, arrays):
    bucket, plan = case
    inputs = StepInputs(bucket, SLOTS, arrays)
    length = bucket.inputs[0].shape[1]
    for rows in plan:
        for index, row in enumerate(rows):
            if row is None:
                inputs.clear(index)
                continue
            identity, start, size = row
            prompt = [(identity * 7 + place) % VOCAB for place in range(start + size)]
            owner = sequence(identity, prompt, identity % len(KINDS), identity % SLOTS)
            inputs.put(index, Row(owner, start, size, True))
            got = {name: np.asarray(inputs.tensors[name])[index] for name in ("tokens", "start", "length")}
            assert got["tokens"].tolist() == prompt[start:] + [0] * (length - size)
            assert (got["start"], got["length"]) == (start, size)
            assert np.asarray(inputs.tensors["block_table"])[index].item() == identity % SLOTS
            assert np.asarray(inputs.tensors["temperature"])[index] == np.float32(owner.params.temperature)
            assert (np.asarray(inputs.tensors["allowed"])[index] != -1).any() == (owner.params.min_tokens > 0)
            assert np.count_nonzero(np.asarray(inputs.tensors["bias_ids"])[index]) == len(owner.params.logit_bias)
        for index, row in enumerate(rows):
            if row is None:
                held = {name: np.asarray(inputs.tensors[name])[index] for name in inputs.tensors}
                assert not held["tokens"].any() and (held["start"], held["length"]) == (0, 1)
                assert held["block_table"].item() == SLOTS
                assert all((held[name] == value).all() for name, value in SAMPLER_DEFAULTS.items() if name in held)
        if arrays:
            inputs.tensors.check()


@pytest.mark.parametrize(
    ("arrays", "bucket", "prompt", "start", "slot", "name"),
    [
        (False, "decode_b1", [VOCAB], 0, 0, "tokens"),
        (True, "prefill_s8", [3, -2, 4], 0, 0, "tokens"),
        (True, "decode_b1", [3] * (LONGEST + 1), LONGEST, 0, "start"),
        (False, "decode_b1", [3], 0, SLOTS + 1, "block_table"),
    ],
)
def test_a_number_outside_its_limits_is_refused_and_its_row_can_be_used_again(
    arrays, bucket, prompt, start, slot, name
):
    inputs = StepInputs(BUCKETS[bucket], SLOTS, arrays)
    with pytest.raises(InputRangeError, match=f"input '{name}' holds the value"):
        inputs.put(0, Row(sequence(1, prompt, 0, slot), start, max(1, len(prompt) - start), True))
    inputs.clear(0)
    inputs.put(0, Row(sequence(2, [3], 0, 0), 0, 1, True))
    if arrays:
        inputs.tensors.check()


@pytest.mark.parametrize("name", ["bias_ids", "adapter"])
def test_numbers_of_the_sampler_are_checked_when_a_row_changes_hands(name):
    """Steps are submitted as already checked, and not checked again."""
    inputs = StepInputs(BUCKETS["decode_b2"], SLOTS, True)
    bad = Sampler({"adapter": 3}, (), ()) if name == "adapter" else Sampler({}, ((VOCAB, 1.0),), ())
    with pytest.raises(InputRangeError, match=f"input '{name}' holds the value"):
        inputs.put(0, Row(sequence(1, [3], 0, 0, bad), 0, 1, True))
    inputs.put(0, Row(sequence(2, [3], 0, 0), 0, 1, True))
    inputs.tensors.check()


@pytest.mark.parametrize(("name", "changed"), [("start", {"dtype": "int32"}), ("block_table", {"shape": [2, 3]})])
def test_graphs_with_other_numbers_are_refused_by_name(name, changed):
    bucket = BUCKETS["decode_b2"]
    inputs = [spec.model_copy(update=changed if spec.name == name else {}) for spec in bucket.inputs]
    check_buckets([bucket])
    with pytest.raises(ModelConfigError, match=f"decode_b2 is not a generation step: its input {name} is int"):
        check_buckets([bucket.model_copy(update={"inputs": inputs})])


def test_inputs_that_are_left_keep_their_defaults_whatever_a_choice_asks_for():
    """A draft model has none of the adapters of the model that it guesses for, nor as many slots for them."""
    inputs = StepInputs(BUCKETS["decode_b1"], SLOTS, True, left=("adapter",))
    asked = sequence(1, [5, 6], 0, 2, Sampler({"adapter": 99, "seed": 7, "temperature": 0.5}, (), ()))
    inputs.put(0, Row(asked, 1, 1, True))
    found = {name: inputs.tensors[name].tolist()[0] for name in ("adapter", "seed", "temperature")}
    assert found == {"adapter": 0, "seed": 7, "temperature": 0.5}
