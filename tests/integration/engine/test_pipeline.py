"""Pipeline stages behind the engine: the tokens of one stage, with every stage at work on another share of the rows."""

from __future__ import annotations

import os
import signal

import pytest

from nxd_server import LLM, SamplingParams
from tests.support.engine.real_artifacts import costs_of, prompt_of, reference_generate, trace_llama
from tests.support.processes import wait_until

PROMPTS = [prompt_of(length) for length in (1, 7, 8, 9, 16, 17, 30, 40, 55, 60)]
PARAMS = [
    SamplingParams(
        max_tokens=12,
        temperature=number % 2 * 0.9,
        seed=number,
        frequency_penalty=0.3 * (number % 3 == 1),
        structured_outputs={"regex": "[a-z ]{20,}"} if number % 4 == 1 else None,
    )
    for number in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def traced():
    return trace_llama(pp=2, slots=8)


def answers(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def wanted(traced):
    """What each is answered alone, when nothing overlaps; greedy ones as by transformers."""
    with LLM(traced[1], costs=costs_of(traced[1])) as llm:
        pairs = zip(PROMPTS, PARAMS, strict=True)
        alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in pairs]
    greedy = [number for number, one in enumerate(PARAMS) if not one.temperature and not one.frequency_penalty]
    theirs = reference_generate(traced[0], [PROMPTS[number] for number in greedy], 12)
    for number, (tokens, gap) in zip(greedy, theirs, strict=True):
        assert alone[number] == tokens or gap < 1e-5
    return alone


@pytest.mark.parametrize("speculate", [0, 2])
def test_greedy_and_seeded_answers_are_those_of_one_stage_while_steps_overlap(traced, wanted, speculate):
    with LLM(traced[1], costs=costs_of(traced[1]), speculate=speculate, restart_limit=9) as llm:
        steps, most = llm.engine.steps, 0

        def begin(*args, _begin=steps.begin, **kwargs):
            nonlocal most
            _begin(*args, **kwargs)
            most = max(most, len(steps.in_flight))

        steps.begin = begin
        assert answers(llm) == wanted
        assert most == 3, "a step per stage, and one that waits"
        ran = llm.engine.stats().bucket_steps
        assert ran["decode_b4"] > ran.get("mixed_b24", 0), "eight streams decode in two shares of four"
        if speculate:
            return
        for number, rank in enumerate((1, 0), 1):  # a lost stage is started again
            os.kill(llm.engine.model.health()[rank].pid, signal.SIGKILL)
            wait_until(lambda number=number: llm.engine.stats().restarts == number and llm.engine.state == "ready", 300)
            assert answers(llm) == wanted
