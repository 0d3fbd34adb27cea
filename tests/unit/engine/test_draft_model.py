"""A draft model that is right always, in part or never: answers are the target's own, and it guesses where it pays."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nxd_infer.errors import ModelConfigError, RankDiedError
from nxd_server.engine import Engine, SamplingParams
from nxd_server.engine.draft_model import LONGEST_PAUSE, DraftModel, check_draft
from nxd_server.engine.rank_restarts import RankRestarts
from nxd_server.engine.sampling_params import Sampler
from nxd_server.engine.speculation import RETRY
from tests.support.engine.asking import BOTH_WAYS, GREEDY, SYSTEM, ask, ask_all, held
from tests.support.engine.schedules import sequence
from tests.support.engine.toy_draft import ToyDraft, target
from tests.support.engine.toy_model import VOCAB, Listener, ToyModel, logits_of, naive_generate
from tests.support.processes import wait_until

DRAWN = GREEDY.replace(temperature=0.8, seed=7)
PROMPT = [(7 * place) % VOCAB for place in range(11)]
HALF = [(5 * place) % VOCAB for place in range(34)]
"""Goes on in the slot in which it was answered before."""
LONG = GREEDY.replace(max_tokens=40)
SAMPLER = Sampler({"temperature": 0}, (), ())


def guessing(engines, draft, model=None, **options):
    return engines(model or target(), draft=draft, draft_costs=draft.costs, **options)


def steps(model, kind):
    return sum(name.startswith(kind) for name, _ in model.steps)


@BOTH_WAYS
@pytest.mark.parametrize("distance", [0.0, 0.3, "never"])
@pytest.mark.parametrize("speculate", [0, 1])
def test_random_traffic_has_the_answers_of_the_target_alone(engines, distance, speculate):
    shapes = {"slots": 3, "max_len": 48, "prompt_buckets": (6, 8), "prompt_rows": 4}
    model, draft = target(**shapes), ToyDraft(distance, **{**shapes, "max_len": 40, "slots": 4})
    engine = guessing(engines, draft, model, speculate=speculate, max_queued_requests=10**6)
    together = threading.Barrier(7)

    def client(number):
        rng = random.Random(number)
        for turn in range(5):
            shared = SYSTEM[: rng.choice([0, 18, 20])]
            prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40 - len(shared))))]
            params = SamplingParams(
                max_tokens=rng.randint(1, min(20, 48 - len(prompt))), temperature=rng.choice([0, 0, 0.7, 1.5]),
                top_k=rng.choice([0, 3]), seed=rng.randrange(2**63), ignore_eos=rng.random() < 0.5,
                min_tokens=rng.choice([0, 0, 1]), presence_penalty=rng.choice([0, 0, 0, 1.0]),
            )  # fmt: skip
            same = ("max_tokens", "temperature", "top_k", "seed", "ignore_eos", "min_tokens")
            expected = naive_generate(prompt, max_len=48, **{name: getattr(params, name) for name in same})
            listener = Listener()
            ticket = engine.submit(prompt, params, listener)
            if turn == 0:
                together.wait(60)
            if cancelled := rng.random() < 0.3:
                time.sleep(rng.random() * 0.01)
                ticket.cancel()
            assert ticket.wait(60)
            if listener.end.reason == "cancelled":
                assert cancelled
                expected = expected[: len(listener.tokens[0])]
            assert listener.tokens[0] == expected

    with ThreadPoolExecutor(6) as pool:
        with held(model):
            clients = pool.map(client, range(6))
            together.wait(60)
        list(clients)
    stats = engine.stats()
    assert sum(stats.finished.values()) == stats.submitted == 30 and stats.restarts == 0
    assert stats.draft_tokens > 0 and draft.restarts == 0
    if distance == 0:  # whatever was in its cache before, and whichever guesses were wrong
        assert stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_all_guesses_of_the_same_model_are_right_whether_greedy_or_drawn(engines, params):
    model, draft = target(), ToyDraft()
    engine = guessing(engines, draft, model)
    params = params.replace(max_tokens=17)
    sampled = {"temperature": params.temperature, "seed": params.seed or 0}
    expected = naive_generate(PROMPT, max_tokens=17, ignore_eos=True, **sampled)
    assert ask(engine, PROMPT, params).tokens[0] == expected
    stats = engine.stats()
    assert stats.draft_tokens == stats.accepted_tokens == 12  # 1 of the prompt's last piece, 4 steps of 4
    assert (steps(model, "verify"), steps(model, "decode")) == (4, 0)


def simulated(draft, count):
    """Guesses and right ones, if each is drawn behind the right text, however many were wrong before."""
    answer = naive_generate(PROMPT, max_tokens=count, ignore_eos=True)
    known, tried, right = 1, 0, 0
    while known < count:
        text = [*PROMPT, *answer[:known]]
        for _ in range(guesses := min(3, count - known - 1)):
            text.append(int(draft.logits(np.array(text)).argmax()))
        same = [a == b for a, b in zip(text[len(PROMPT) + known :], answer[known:], strict=False)]
        kept = same.index(False) if False in same else len(same)
        known, tried, right = known + kept + 1, tried + guesses, right + kept
    return tried, right


@pytest.mark.parametrize("distance", [0.2, 0.35])
def test_wrong_guesses_are_overwritten_in_its_cache(engines, distance):
    draft = ToyDraft(distance)
    engine = guessing(engines, draft)
    ask(engine, PROMPT, LONG)
    stats = engine.stats()
    assert (stats.draft_tokens, stats.accepted_tokens) == simulated(draft, 40)
    assert 5 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize(
    ("right", "more", "behind"), [(0, 0, 1), (0, 2, 3), (1, 0, 1), (1, 2, 3), (3, 0, 2), (3, 3, 5)]
)
def test_what_it_has_read_ends_before_the_first_wrong_guess(right, more, behind):
    """Also where steps without guesses follow, in which prompts are read."""
    draft = DraftModel(ToyDraft(), target().manifest, RankRestarts(0, 1.0))
    one = sequence(1, PROMPT, 40, GREEDY, SAMPLER, output=[3], slot=2)
    (guesses,) = draft.guess([(one, 3)])
    wrong = (guesses[right] + 1) % VOCAB if right < 3 else 50
    one.output += [*guesses[:right], wrong, *guesses[:more]]
    assert draft.behind(one) == behind
    (again,) = draft.guess([(one, 1)])
    assert again[0] == int(logits_of(np.array([*PROMPT, *one.output])).argmax())


def test_a_draft_whose_graphs_take_single_tokens_reads_one_by_one(engines):
    draft = ToyDraft(prompt_buckets=())
    engine = guessing(engines, draft)
    for params in (LONG, LONG.replace(temperature=0.8, seed=2)):
        ask(engine, PROMPT, params)
    assert engine.stats().accepted_tokens == engine.stats().draft_tokens > 20 and draft.restarts == 0


def test_drawn_guesses_are_right_more_often_with_the_targets_noise_than_without(engines):
    """As the two distributions overlap: these draw the same token far more often than independent draws would."""
    draft = ToyDraft(0.3)
    engine = guessing(engines, draft, costs=None)
    for seed in range(12):
        ask(engine, PROMPT, DRAWN.replace(seed=seed, max_tokens=40))
    stats = engine.stats()
    assert stats.accepted_tokens > 0.25 * stats.draft_tokens > 0


def test_a_draft_that_is_never_right_is_left_and_tried_again_ever_less_often(engines):
    model, draft = target(max_len=4096), ToyDraft("never", max_len=4096)
    draft.costs = dict.fromkeys(draft.costs, 1e-4)
    engine = guessing(engines, draft, model)
    params = GREEDY.replace(max_tokens=1000)
    assert ask(engine, PROMPT, params).tokens[0] == naive_generate(PROMPT, max_tokens=1000, ignore_eos=True)
    first = engine.stats().draft_tokens
    assert 0 < steps(model, "verify") < 30 and first < 100
    ask(engine, PROMPT, params)
    assert engine.stats().draft_tokens - first < first, "a new request begins with what is known of the others"
    draft.distance = 0.0
    ask(engine, PROMPT, GREEDY.replace(max_tokens=3 * LONGEST_PAUSE))
    assert engine.stats().accepted_tokens > LONGEST_PAUSE / 4, "and is used again once it is right"


@pytest.mark.parametrize(("distance", "most"), [(0.0, 1), ("never", 2)])
def test_while_there_are_no_guesses_a_step_begins_before_the_one_before_it_ends(engines, distance, most):
    model, draft = target(), ToyDraft(distance)
    engine = guessing(engines, draft, model)
    model.most_begun = 0
    draft.costs = dict.fromkeys(draft.costs, 1e-4)
    assert ask(engine, PROMPT, LONG).tokens[0] == naive_generate(PROMPT, max_tokens=40, ignore_eos=True)
    assert (engine.stats().accepted_tokens > 0) == (distance == 0)
    assert model.most_begun == most


def test_a_draft_whose_steps_cost_more_than_they_save_is_only_tried(engines):
    model, draft = target(), ToyDraft()
    draft.costs = dict.fromkeys(draft.costs, 1e-3)  # as a step of the target: four of them give four tokens
    engine = guessing(engines, draft, model)
    assert ask(engine, PROMPT, LONG).tokens[0] == naive_generate(PROMPT, max_tokens=40, ignore_eos=True)
    assert engine.stats().draft_tokens == 3 and steps(model, "verify") == 1 and RETRY < 40


def test_prompts_are_read_in_pieces_between_the_steps_of_others(engines):
    """None longer than a step of the target; and requests that join and leave have guesses of their own."""
    model, draft = target(max_len=256), ToyDraft(prompt_buckets=(8, 128), max_len=256)
    draft.costs |= {"prefill_s8": 1e-5, "prefill_s128": 2e-3}
    engine = guessing(engines, draft, model)
    prompts = [[(number + 3 * place) % VOCAB for place in range(60 - 9 * number)] for number in range(5)]
    for listener, prompt in zip(ask_all(engine, prompts), prompts, strict=True):
        assert listener.tokens[0] == naive_generate(prompt, max_tokens=12, ignore_eos=True)
    assert {name for name, _ in draft.steps} & {"prefill_s8", "prefill_s128"} == {"prefill_s8"}
    assert engine.stats().accepted_tokens > 0
    before = steps(draft, "prefill")
    ask(engine, prompts[-1], LONG)
    assert steps(draft, "prefill") == before, "what a slot holds is not read again"


def test_a_prompt_is_not_read_for_an_answer_that_is_too_short_to_pay(engines):
    model, draft = target(max_len=256), ToyDraft(prompt_buckets=(8,), max_len=256)
    draft.costs |= {"prefill_s8": 1e-3}
    engine = guessing(engines, draft, model)
    prompt = [place % VOCAB for place in range(120)]
    model.most_begun = 0
    ask(engine, prompt, GREEDY.replace(max_tokens=8))
    assert not draft.steps and model.most_begun == 2
    ask(engine, prompt, GREEDY.replace(max_tokens=100))
    assert draft.steps and engine.stats().accepted_tokens > 0


def dies(draft):
    def fail(name, inputs):
        draft.dead, draft.fail = True, lambda name, inputs: None
        raise RankDiedError("killed by the test", 0)

    draft.fail = fail


@pytest.mark.parametrize("limit", [1, 0])
def test_without_its_ranks_answers_go_on_and_the_draft_comes_back_if_it_may(engines, caplog, limit):
    """The new ranks have read nothing, also of what is in its slot still."""
    model, draft = target(), ToyDraft()
    params = GREEDY.replace(max_tokens=25)
    engine = guessing(engines, draft, model, restart_limit=limit)
    expected = naive_generate(HALF, max_tokens=25, ignore_eos=True)
    assert ask(engine, HALF, params).tokens[0] == expected
    dies(draft)
    assert ask(engine, HALF, params).tokens[0] == expected
    assert engine.stats().restarts == 0 and "answers go on without it" in caplog.text
    if limit == 0:
        assert not engine._draft.ready and draft.restarts == 0 and "is not started again" in caplog.text
        return
    wait_until(lambda: engine._draft.ready)
    accepted = engine.stats().accepted_tokens
    assert ask(engine, HALF, params).tokens[0] == expected
    assert draft.restarts == 1 and engine.stats().accepted_tokens == engine.stats().draft_tokens > accepted
    dies(draft)  # as often as the limit allows, and no more
    assert ask(engine, HALF, params).tokens[0] == expected
    assert not engine._draft.ready and draft.restarts == 1
    assert engine.health().draft == {"ready": False, "restarts": 1}


def test_lost_ranks_of_the_target_and_new_weights_leave_the_draft_as_it_is(engines):
    model, draft = target(), ToyDraft()
    engine = guessing(engines, draft, model)
    ask(engine, PROMPT)
    engine.update_weights(3)
    expected = naive_generate(PROMPT, max_tokens=40, ignore_eos=True, weights=3)
    assert ask(engine, PROMPT, LONG).tokens[0] == expected
    dies(model)
    ask(engine, PROMPT)
    wait_until(lambda: engine.state == "ready")
    model.weights = 0
    assert ask(engine, PROMPT, LONG).tokens[0] == naive_generate(PROMPT, max_tokens=40, ignore_eos=True)
    assert draft.restarts == 0 and engine.stats().restarts == 1


def smaller(**metadata):
    draft = ToyDraft()
    draft.manifest.metadata |= metadata
    return draft


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (smaller(vocab_size=96), "its vocabulary has 96 tokens and the model's 97: give .* the same tokenizer"),
        (ToyDraft(slots=3, batch_sizes=(1,)), "has 3 slots and the model 4: trace the draft again with --slots 4"),
        (smaller(bias_slots=0), "has 0 bias_slots and the model 4: trace the draft again with --bias-slots 4"),
        (smaller(task="embed"), "both artifacts must be of decoders"),
        (ToyDraft(omit=("top_p", "seed")), "its graphs lack seed, top_p"),
    ],
)
def test_a_draft_that_does_not_go_with_the_model_is_refused_with_the_fix(draft, words):
    with pytest.raises(ModelConfigError, match=words):
        check_draft(target().manifest, draft.manifest)


def test_a_model_that_verifies_nothing_takes_no_draft_and_a_larger_one_is_refused():
    fix = "^draft: the model was traced without a graph that verifies guesses; .* --speculate 4$"
    with pytest.raises(ModelConfigError, match=fix):
        Engine(ToyModel(), draft=ToyDraft())
    draft = ToyDraft()
    draft.manifest.tp_degree = 2
    with pytest.raises(ModelConfigError, match=r"has 2 ranks and the model 1, whose cores they share: .* --tp 1"):
        Engine(target(), draft=draft)
