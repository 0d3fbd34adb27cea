"""Pipeline stages behind the engine: the tokens of one stage, with every stage at work on another share of the rows."""

from __future__ import annotations

import os
import signal
from collections import deque

import pytest

from nxd_server import LLM, SamplingParams
from tests.support.engine.real_artifacts import BATCHES, MAX_LEN, PROMPT_BUCKETS, costs_of
from tests.support.engine.schedules import scheduler, sequence
from tests.support.processes import wait_until
from tests.support.tiny_models import write_tiny

LENGTHS = (1, 7, 8, 9, 16, 17, 30, 40, 55, 60)
PARAMS = [
    SamplingParams(
        max_tokens=12,
        temperature=number % 2 * 0.9,
        seed=number,
        frequency_penalty=0.3 * (number % 3 == 0),
        structured_outputs={"regex": "[a-z ]{20,}"} if number % 4 == 1 else None,
    )
    for number in range(len(LENGTHS))
]


def prompt_of(length):
    return [5 + (7 * place + 3 * length) % 280 for place in range(length)]


def trace(model_dir, out, pp, **options):
    import torch

    import nxd_infer as nxd
    from nxd_models.serving import tasks

    sizes = {"batch_sizes": BATCHES, "prompt_buckets": PROMPT_BUCKETS, "max_len": MAX_LEN, "slots": 8}
    plan = tasks.plan(model_dir, "generate", dtype=torch.float32, **sizes, **options)
    arguments = {**plan.trace_arguments(), "pp_degree": pp, "backend": "eager", "artifact_dir": out}
    nxd.trace.parallel_model_trace(**arguments).close()
    return out


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny("llama", tmp_path_factory.mktemp("pipeline") / "model")


@pytest.fixture(scope="module")
def artifact(model_dir):
    return trace(model_dir, model_dir.parent / "pp2", 2, speculate=2)


def answers(llm):
    prompts = [prompt_of(length) for length in LENGTHS]
    params = [one.replace(max_tokens=min(12, llm.room(p))) for one, p in zip(PARAMS, prompts, strict=True)]
    outputs = llm.generate(prompts, params)
    return [output.outputs[0].token_ids for output in outputs]


def deepest(llm):
    """Note the most steps that were in flight at once; return a function that tells."""
    steps = llm.engine.parts.steps
    most, begin = [0], steps.begin

    def counted(*args, **kwargs):
        begin(*args, **kwargs)
        most[0] = max(most[0], len(steps.in_flight))

    steps.begin = counted
    return lambda: most[0]


@pytest.fixture(scope="module")
def wanted(model_dir):
    with LLM(trace(model_dir, model_dir.parent / "pp1", 1, speculate=2)) as llm:
        return answers(llm)


@pytest.mark.parametrize("speculate", [0, 2])
def test_greedy_and_seeded_answers_are_those_of_one_stage_while_steps_overlap(artifact, wanted, speculate):
    with LLM(artifact, costs=costs_of(artifact), speculate=speculate) as llm:
        most = deepest(llm)
        assert answers(llm) == wanted
        assert most() == 3, "a step per stage, and one that waits"
        ran = llm.engine.stats().bucket_steps
        assert ran["decode_b4"] > ran.get("mixed_b24", 0), "eight streams decode in two shares of four"


def test_a_lost_stage_is_started_again_and_answers_stay_the_same(artifact, wanted):
    with LLM(artifact, costs=costs_of(artifact), restart_limit=9) as llm:
        for number, rank in enumerate((1, 0), 1):
            os.kill(llm.engine.model.health()[rank].pid, signal.SIGKILL)
            wait_until(lambda number=number: llm.engine.stats().restarts == number and llm.engine.state == "ready", 300)
            assert answers(llm) == wanted


# --- the scheduler alone ------------------------------------------------------------------------------------------


def streaming(subject, count):
    """``count`` choices whose last tokens are known."""
    items = [sequence(identity, 4, 100) for identity in range(count)]
    for item in items:
        subject.add(item)
    subject.admit()
    while any(not item.output for item in items):
        step = subject.next_step()
        subject.begin(step)
        give(step)
    return items


def give(step):
    for row in step.rows:
        if row.samples:
            row.sequence.output.append(7)


def test_each_step_takes_its_share_and_waits_for_the_tokens_of_its_rows():
    subject = scheduler(slots=8, batches=(1, 2, 4, 8), groups=2)
    streaming(subject, 6)
    first = subject.next_step()
    subject.begin(first)
    second = subject.next_step()
    subject.begin(second)
    rows = [{row.sequence.id for row in step.rows} for step in (first, second)]
    assert [len(ids) for ids in rows] == [3, 3] and not rows[0] & rows[1]
    assert subject.next_step() is None, "all wait for their tokens"
    give(first)
    assert {row.sequence.id for row in subject.next_step().rows} == rows[0]


def test_a_prompt_advances_while_all_streams_are_under_way():
    """So does its next piece, once each stream has advanced, although decoding has not taken its share of the time."""
    subject = scheduler(slots=8, batches=(1, 2, 4, 8), ratio=1, groups=2)
    streaming(subject, 2)
    decoding = [subject.next_step(), None]
    subject.begin(decoding[0])
    decoding[1] = subject.next_step()
    subject.begin(decoding[1])
    subject.add(sequence(10, prompt=40, new=4))
    subject.admit()
    piece = subject.next_step()
    assert piece.kind == "prefill" and piece.rows[0].length <= 16
    subject.begin(piece)
    for step in decoding:
        assert subject.next_step() is None, "a stream has not advanced since the piece before"
        give(step)
        following = subject.next_step()
        assert following.kind == "decode"
        subject.begin(following)
    assert subject._debt > 0
    assert subject.next_step().kind == "prefill"


def test_uneven_shares_do_not_stay():
    """Three shares for two stages would take half as long again as two: each reads the weights of every stage."""
    subject = scheduler(slots=8, batches=(1, 2, 4, 8), groups=2)
    streaming(subject, 1)
    under_way: deque = deque()
    sizes = []
    for number in range(60):
        if number % 3 == 0 and number < 21:
            subject.add(sequence(10 + number, prompt=4, new=60))
            subject.admit()
        step = subject.next_step() if len(under_way) < 3 else None
        if step is None:
            give(under_way.popleft())
            continue
        subject.begin(step)
        under_way.append(step)
        sizes.append(len(step.rows))
    assert sizes[-8:] == [4] * 8, sizes
