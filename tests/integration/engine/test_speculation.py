"""Answers with guesses against answers without: a tiny Llama; in bfloat16, compiled, the very bits."""

from __future__ import annotations

import pytest
import torch

from nxd_infer.errors import ModelConfigError
from nxd_infer.trace import parallel_model_load
from nxd_models.serving.decoder_step import step_inputs
from nxd_server import LLM, SamplingParams
from nxd_server.engine import Engine
from tests.support.engine.real_artifacts import GUESSES, costs_of, paying_costs, prompt_of, trace_llama
from tests.support.engine.toy_model import ToyModel

REPETITIVE = [[11, 12, 13, 14] * 6, [7] * 9, [20, 21, 22, 23, 24, 20, 21, 22]]
RANDOM = [prompt_of(length) for length in (3, 11, 20, 33)]
GREEDY = SamplingParams(max_tokens=28, temperature=0, ignore_eos=True)
FEW = GREEDY.replace(logit_bias=dict.fromkeys((20, 21, 22, 23), 3.0))
"""Partly right guesses all the time."""


@pytest.fixture(scope="module")
def llms():
    """The same artifact without and with guesses; with them whenever there are any, right or wrong."""
    artifact = trace_llama()[1]
    options = {"prefix_caching": False}  # which slot holds a prompt hangs on when the answers end
    with (
        LLM(artifact, costs=costs_of(artifact), **options) as plain,
        LLM(artifact, speculate=GUESSES, costs=paying_costs(artifact), **options) as guessing,
    ):
        yield plain, guessing


def counted(llm, name):
    """Steps so far of the graphs whose name begins so."""
    return sum(count for bucket, count in llm.engine.stats().bucket_steps.items() if bucket.startswith(name))


def compare(llms, prompts, params):
    """Ask both, all prompts at once; the answers of the one that guesses."""
    plain, guessing = (llm.generate(prompts, params) for llm in llms)
    for expected, found in zip(plain, guessing, strict=True):
        assert found.usage == expected.usage
        for a, b in zip(expected.outputs, found.outputs, strict=True):
            assert (b.token_ids, b.text, b.finish_reason, b.stop) == (a.token_ids, a.text, a.finish_reason, a.stop)
            for ours, theirs in zip(b.logprobs or [], a.logprobs or [], strict=True):
                assert ours.token == theirs.token and ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert len(ours.top) == len(theirs.top)
                assert [v for _, v in ours.top] == pytest.approx([v for _, v in theirs.top], abs=1e-4)
    return guessing


@pytest.mark.smoke
def test_greedy_answers_are_the_same_and_take_fewer_steps(llms):
    plain, guessing = llms
    params = [GREEDY, FEW, FEW, FEW.replace(max_tokens=40), GREEDY, FEW, GREEDY]
    compare(llms, REPETITIVE + RANDOM, params)
    before = [counted(llm, "decode") + counted(llm, "verify") for llm in llms]
    for prompt in REPETITIVE:  # alone: how many steps several share hangs on when each of them came
        compare(llms, [prompt], GREEDY)
    steps = [counted(llm, "decode") + counted(llm, "verify") - old for llm, old in zip(llms, before, strict=True)]
    assert steps[1] < steps[0] and counted(guessing, "verify") > 0 and counted(plain, "verify") == 0
    stats = guessing.engine.stats()
    assert 40 < stats.accepted_tokens < stats.draft_tokens
    assert plain.engine.stats().draft_tokens == 0
    assert stats.generated_tokens == plain.engine.stats().generated_tokens


def test_a_conversation_goes_on_behind_what_guesses_penalties_and_samples_left_in_its_slot(llms):
    """What they wrote there is what the next turn finds, with a cache and without; with guesses and without."""
    artifact = llms[0].model.artifact.path
    short = {"max_tokens": 9}
    styles = [
        FEW.replace(**short),
        FEW.replace(**short),
        GREEDY.replace(**short, repetition_penalty=1.7),
        SamplingParams(**short, temperature=0.9, seed=4, ignore_eos=True),
        GREEDY.replace(**short, presence_penalty=1.5, frequency_penalty=0.5),
        FEW.replace(**short),
    ]

    def talk(llm):
        said, reused = list(REPETITIVE[2]) * 3, []
        for turn, style in enumerate(styles):
            (found,) = llm.generate(said, style)
            reused.append(found.usage.cached_tokens)
            said += [*found.outputs[0].token_ids, 30 + turn, 31]
        return said, reused

    expected, nothing = talk(llms[0])
    with LLM(artifact, costs=costs_of(artifact)) as caching:
        said, reused = talk(caching)
    assert said == expected and nothing == [0] * 6
    # Penalties count what a slot was fed from its start, so those turns read all of it.
    assert [bool(count) for count in reused] == [False, True, False, True, False, True]
    with LLM(artifact, speculate=GUESSES, costs=paying_costs(artifact)) as guessing:
        assert talk(guessing) == (said, reused)
        assert guessing.engine.stats().draft_tokens > guessing.engine.stats().accepted_tokens > 0


def test_a_draft_is_verified_with_the_bits_of_decode():
    """In bfloat16: every number of five tokens in one step is that of five steps."""
    only = ("decode_b4", "verify_b4")
    artifact = trace_llama(only=only, dtype=torch.bfloat16)[1]
    prompt, fed = RANDOM[1], torch.tensor([[31, 7, 200, 7, 31]])
    start = len(prompt)
    with parallel_model_load(artifact, in_process=True) as model:

        def run(bucket, tokens, at):
            (batch, length), count = model.manifest.bucket(bucket).inputs[0].shape, tokens.shape[1]
            metadata = model.manifest.metadata
            inputs = step_inputs(metadata["vocab_size"], batch, length, metadata["slots"])
            inputs["tokens"][0, :count], inputs["start"][0], inputs["length"][0] = tokens[0], at, count
            inputs["block_table"][0], inputs["prompt_length"][0] = 0, start
            outputs = model.run_bucket(bucket, inputs)
            return {name: value[0, :count].clone() for name, value in outputs.items()}

        for place, token in enumerate(prompt):
            run("decode_b4", torch.tensor([[token]]), place)
        alone = [run("decode_b4", fed[:, place : place + 1], start + place) for place in range(GUESSES + 1)]
        together = run("verify_b4", fed, start)
    for name, found in together.items():
        assert torch.equal(found, torch.cat([one[name] for one in alone])), name


def test_one_prompt_alone_and_up_to_the_last_position(llms):
    for prompt in (REPETITIVE[1], RANDOM[2] * 12):
        (output,) = compare(llms, prompt, GREEDY.replace(max_tokens=None))
        assert output.outputs[0].finish_reason == "length"


def test_whatever_a_request_asks_for_stays_right(llms):
    """Drawn, biased, penalised, with log-probabilities, with the end kept away, several choices: all in one batch."""
    eos = llms[0].engine.eos_token_ids[0]
    drawn = SamplingParams(max_tokens=24, temperature=0.7, seed=5, ignore_eos=True)
    asked = [
        (REPETITIVE[0], drawn),
        (REPETITIVE[1], drawn.replace(n=3, top_p=0.9, logit_bias={7: 6.0})),
        (REPETITIVE[2], GREEDY.replace(logprobs=5)),
        (REPETITIVE[0], GREEDY.replace(frequency_penalty=0.6, presence_penalty=0.3)),
        (REPETITIVE[0], GREEDY.replace(repetition_penalty=1.2)),
        (REPETITIVE[1], GREEDY.replace(logit_bias={7: 50.0})),
        (REPETITIVE[2], GREEDY.replace(ignore_eos=False, min_tokens=9, logit_bias={eos: 100.0})),
        (REPETITIVE[2], GREEDY.replace(ignore_eos=False, min_tokens=9, logit_bias={eos: 100.0, 20: 90.0}, logprobs=0)),
    ]
    accepted = llms[1].engine.stats().accepted_tokens
    outputs = compare(llms, [prompt for prompt, _ in asked], [params for _, params in asked])
    assert llms[1].engine.stats().accepted_tokens > accepted
    assert outputs[5].outputs[0].token_ids == [7] * 28
    assert outputs[6].outputs[0].token_ids[-1] == eos and outputs[6].usage.completion_tokens == 10
    assert len(outputs[2].outputs[0].logprobs or []) == 28


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_a_draft_model_changes_nothing_whatever_a_request_asks_for(ranks):
    """A model of one layer in bfloat16, which has no graphs for prompts, guesses for one on two ranks."""
    artifact = trace_llama(**ranks)[1]
    draft = trace_llama(only=("decode_b4", "verify_b4"), dtype=torch.bfloat16)[1]
    drawn = SamplingParams(max_tokens=24, temperature=0.7, seed=5, ignore_eos=True)
    asked = [
        (RANDOM[0], GREEDY),
        (RANDOM[1], drawn.replace(n=3, top_p=0.9)),
        (RANDOM[2], drawn.replace(logprobs=3, top_k=40, min_p=0.01)),
        (RANDOM[3], GREEDY.replace(frequency_penalty=0.6)),
        (REPETITIVE[0], FEW),
        (RANDOM[2] + RANDOM[3], drawn.replace(prompt_logprobs=1)),
        (REPETITIVE[1], GREEDY.replace(ignore_eos=False, min_tokens=9)),
        (RANDOM[1], GREEDY.replace(structured_outputs={"regex": "[a-z]{3} [0-9]{2}"})),
    ]
    options = {"prefix_caching": False}  # which slot holds a prompt hangs on when the answers end
    guesses = {"costs": paying_costs(artifact), "draft_costs": {"decode_b4": 1e-6, "verify_b4": 2e-6}}
    with (
        LLM(artifact, costs=costs_of(artifact), **options) as plain,
        LLM(artifact, draft=draft, **guesses, **options) as guessing,
    ):
        for _ in range(2):
            compare((plain, guessing), [prompt for prompt, _ in asked], [params for _, params in asked])
        stats = guessing.engine.stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        assert "pp" in ranks or stats.accepted_tokens > stats.draft_tokens / 4  # the same model otherwise


@pytest.mark.parametrize("length", [1, 4, 6])
def test_an_answer_ends_in_the_middle_of_right_guesses(llms, length):
    """Ended by its length, a stop token or a stop string: no later token is sent or counted."""
    biased = GREEDY.replace(logit_bias={7: 50.0})
    compare(llms, [7] * 9, biased.replace(max_tokens=length))
    whole = llms[0].generate(REPETITIVE[2], GREEDY)[0].outputs[0]
    compare(llms, REPETITIVE[2], GREEDY.replace(stop_token_ids=[whole.token_ids[length]]))
    text = llms[0].tokenizer.decode(whole.token_ids[: length + 1])
    compare(llms, REPETITIVE[2], GREEDY.replace(stop=[text[-2:]]))


def test_what_an_artifact_cannot_verify_is_refused_with_the_fix(llms):
    with pytest.raises(ModelConfigError, match=r"speculate = 3: .* was traced without .* again with --speculate 3"):
        Engine(ToyModel(), speculate=3)
    model = llms[0].model
    with pytest.raises(ModelConfigError, match="verifies 4 guesses at most; trace the model again with --speculate 5"):
        Engine(model, speculate=5)
    for bad in (-1, True, 1.5, "2"):
        with pytest.raises(ModelConfigError, match=f"speculate must be a whole number of at least 0, got {bad!r}"):
            Engine(model, speculate=bad)  # pyright: ignore[reportArgumentType]
