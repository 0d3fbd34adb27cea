"""The step that verifies drafts: behind each guess the token that decode gives there, and no trace of wrong guesses."""

from __future__ import annotations

import pytest
import torch

from nxd_infer.errors import ModelConfigError
from nxd_models import registry
from nxd_models.hf import weights as hf
from nxd_models.llama.family import LlamaStep
from nxd_models.serving import tasks
from nxd_models.serving.decoder_step import step_inputs
from nxd_models.serving.eager_generation import generate_eager
from tests.support.models.helpers import prompts_of
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

GUESSES = 4
SETTINGS = {
    "greedy": {},
    "drawn": {"temperature": 1.1, "top_p": 0.9, "seed": 9},
    "biased": {"temperature": 0.8, "seed": 3, "bias_ids": 7, "bias_values": 2.5},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny("llama", tmp_path_factory.mktemp("verification") / "llama")


@pytest.fixture
def step(path):
    config = registry.load_config(path).config
    return hf.load(LlamaStep(config, slots=4, max_len=48, draft_tokens=GUESSES), registry.weights(path)).eval()


def run(step, rows, length=GUESSES + 1, **settings):
    """One step of ``(slot, start, tokens, prompt length)`` rows."""
    inputs = step_inputs(VOCAB_SIZE, len(rows), length, step.slots)
    for at, (slot, start, tokens, prompt) in enumerate(rows):
        inputs["block_table"][at] = slot
        inputs["start"][at] = start
        inputs["length"][at] = len(tokens)
        inputs["tokens"][at, : len(tokens)] = torch.tensor(tokens)
        inputs["prompt_length"][at] = prompt
    for name, value in settings.items():
        inputs[name][:] = torch.as_tensor(value, dtype=inputs[name].dtype)
    with torch.no_grad():
        return step(**inputs)


def prefill(step, slot, prompt, **settings):
    return int(run(step, [(slot, 0, prompt, len(prompt))], len(prompt), **settings)["token"])


@pytest.mark.parametrize(("name", "right"), [("greedy", 0), ("greedy", 4), ("drawn", 1), ("drawn", 4), ("biased", 2)])
def test_right_guesses_give_what_decode_gives_and_wrong_ones_leave_nothing(step, name, right):
    settings = SETTINGS[name]
    prompt, other = prompts_of([7, 11], VOCAB_SIZE, seed=40)
    plain = generate_eager(step, [prompt], 10, **settings)[0]
    expected = plain.tokens
    assert prefill(step, 1, prompt, **settings) == expected[0]
    prefill(step, 0, other, **settings)
    guesses = [*expected[1 : 1 + right], *[(token + 1) % VOCAB_SIZE for token in expected[1 + right : 1 + GUESSES]]]
    # A mate with no guess, and one that is padding, share the step.
    rows = [(0, len(other), [5], len(other)), (4, 0, [], 0), (1, len(prompt), [expected[0], *guesses], len(prompt))]
    outputs = run(step, rows, **settings)
    assert outputs["token"].shape == (3, GUESSES + 1) and outputs["top_logprobs"].shape == (3, GUESSES + 1, 20)
    assert outputs["token"][2, : right + 1].tolist() == expected[1 : right + 2]
    logprobs = outputs["logprob"][2, : right + 1].tolist()
    assert logprobs == pytest.approx(plain.logprobs[1 : right + 2], abs=1e-5)
    assert step.last_token[1] == expected[right + 1]
    # What was wrong is written over before it is read, whatever step comes next.
    at = right + 1
    for length in (1, GUESSES + 1, 1):
        token = run(step, [(1, len(prompt) + at, [expected[at]], len(prompt))], length, **settings)["token"][0, 0]
        assert token == expected[at + 1]
        at += 1


def test_a_row_without_guesses_keeps_its_penalties(step):
    """It shares its mates' step with a single token, counted and sampled as a decode step does."""
    prompt = prompts_of([6], VOCAB_SIZE, seed=41)[0]
    settings = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    expected = generate_eager(step, [prompt], 8, **settings)[0].tokens
    made = [prefill(step, 2, prompt, **settings)]
    while len(made) < 8:
        row = (2, len(prompt) + len(made) - 1, [made[-1]], len(prompt))
        made.append(int(run(step, [row], **settings)["token"][0, 0]))
    assert made == expected


def test_the_plan_has_a_graph_that_verifies_for_every_batch(path):
    plan = tasks.plan(path, batch_sizes=[1, 4], prompt_buckets=[16], max_len=64, speculate=4)
    shapes = {name: tuple(e["tokens"].shape) for name, e in zip(plan.bucket_names, plan.example_inputs, strict=True)}
    assert (shapes["verify_b1"], shapes["verify_b4"]) == ((1, 5), (4, 5))
    assert plan.metadata["speculate"] == 4


def test_what_cannot_be_speculated_with_is_refused(path, tmp_path):
    for speculate in (-1, 16, True, 1.5):
        with pytest.raises(ModelConfigError, match="speculate must be a whole number from 0 to 15"):
            tasks.plan(path, speculate=speculate)
    with pytest.raises(ModelConfigError, match="a step of 16 tokens verifies guesses"):
        tasks.plan(path, prompt_buckets=[16], speculate=15)
    with pytest.raises(ModelConfigError, match="max_len = 8"):
        tasks.plan(path, prompt_buckets=[4], max_len=8, speculate=8)
    with pytest.raises(ModelConfigError, match="'embed' guesses no tokens"):
        tasks.plan(write_tiny("bert", tmp_path / "bert"), "embed", speculate=2)
