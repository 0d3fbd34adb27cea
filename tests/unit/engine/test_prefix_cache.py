"""Prompts that begin like one before them: the same tokens as without a cache, and fewer of them computed. The toy
model's answer depends on every token in its slot, so one stale entry changes it."""

from __future__ import annotations

from itertools import chain, repeat
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer.errors import InputMismatchError, RankDiedError
from nxd_server.engine import SamplingParams
from nxd_server.engine.scheduler import FEWEST_REUSED, SlotPool
from nxd_server.errors import GenerationError, RequestError
from tests.support.engine.asking import GREEDY, SYSTEM, ask
from tests.support.engine.toy_model import ToyModel, naive_generate
from tests.support.processes import wait_until

LONG = GREEDY.replace(max_tokens=6)


def naive(prompt, **more):
    return naive_generate(prompt, max_tokens=6, ignore_eos=True, **more)


def cached(answer):
    return answer.end.usage.cached_tokens


@settings(max_examples=50)
@given(data=st.data(), count=st.integers(1, 4))
def test_a_slot_never_claims_a_token_that_it_does_not_hold(data, count):
    """Against a list of what each slot holds, over short alphabets, so that prompts share their starts."""
    pool, holds, used = SlotPool(count), {}, {}
    tokens = st.lists(st.integers(0, 1), max_size=60).map(lambda tail: [7] * 20 + tail)
    for _ in range(data.draw(st.integers(1, 25))):
        if used and (not pool.free or data.draw(st.booleans())):
            slot = data.draw(st.sampled_from(sorted(used)))
            written = used.pop(slot)
            holds[slot] = written if data.draw(st.booleans()) else (None, [])
            pool.release(slot, holds[slot][1], holds[slot][0])
        elif pool.free:
            prompt, key = data.draw(tokens), data.draw(st.sampled_from("ab"))
            slot, shared = pool.allocate(prompt, key)
            assert slot not in used
            held_key, held_tokens = holds.get(slot, (None, []))
            assert 0 <= shared < len(prompt) and held_tokens[:shared] == prompt[:shared]
            assert key == held_key or shared == 0
            fits = min(len(prompt) - 1, len(held_tokens)) if key == held_key else 0
            assert shared == next((i for i in range(fits) if held_tokens[i] != prompt[i]), fits), "all that it holds"
            used[slot] = (key, prompt)
        assert pool.used == len(used) and pool.free + pool.used == count


def test_a_prompt_gets_the_slot_that_holds_most_of_it_else_the_one_that_was_free_for_the_longest_time():
    pool = SlotPool(3)
    first, second, third = (pool.allocate()[0] for _ in range(3))
    pool.release(first, SYSTEM + [1] * 5)
    pool.release(third, SYSTEM + [2] * 10)
    pool.release(second, [9] * 30)
    assert pool.allocate([*SYSTEM, 2, 2, 2, 3, 4]) == (third, 23)
    assert pool.allocate([8] * 10) == (first, 0)
    pool.release(first, SYSTEM + [1] * 100)
    pool.release(third)
    assert pool.allocate([*SYSTEM, 4]) == (third, 0), "most of what the first holds would be overwritten for little"
    assert pool.allocate([9] * (FEWEST_REUSED - 1)) == (second, FEWEST_REUSED - 2), "it was the next one anyway"
    with pytest.raises(IndexError, match="no slot"):
        SlotPool(1).allocate() and pool.allocate() and pool.allocate()


def test_a_conversation_computes_only_what_is_new(engines):
    model = ToyModel(slots=2, max_len=128)
    engine = engines(model)
    talk = list(SYSTEM)
    for turn in range(4):
        answer = ask(engine, talk, LONG)
        assert answer.tokens[0] == naive(talk)
        # The answer's last token was never fed.
        assert cached(answer) == (0 if turn == 0 else len(talk) - 4)
        talk += [*answer.tokens[0], 40 + turn, 50, 60]
        if turn == 1:
            assert ask(engine, [3, 1, 4], LONG).tokens[0] == naive([3, 1, 4]), "others take the other slot"
    stats = engine.stats()
    assert stats.prompt_tokens == sum(20 + 9 * turn for turn in range(4)) + 3
    assert stats.reused_tokens == sum(16 + 9 * turn for turn in range(1, 4))
    fed = sum(engine.steps.useful_tokens.values())
    assert fed == stats.prompt_tokens - stats.reused_tokens + 5 * 5  # each answer feeds all its tokens but the last


def test_new_weights_and_new_ranks_find_nothing(engines):
    model = ToyModel(slots=2, max_len=64)
    engine = engines(model)
    assert ask(engine, SYSTEM, LONG).tokens[0] == naive(SYSTEM)
    assert cached(ask(engine, SYSTEM, LONG)) == 19
    engine.update_weights(5)
    answer = ask(engine, SYSTEM, LONG)
    assert answer.tokens[0] == naive(SYSTEM, weights=5) and cached(answer) == 0
    assert cached(ask(engine, SYSTEM, LONG)) == 19
    model.fail = Mock(side_effect=chain([RankDiedError("killed", 0)], repeat(None)))
    assert not hasattr(ask(engine, [1, 2], LONG).end, "reason")
    wait_until(lambda: model.restarts == 1 and engine.state == "ready")
    answer = ask(engine, SYSTEM, LONG)
    assert answer.tokens[0] == naive(SYSTEM, weights=5) and cached(answer) == 0


def test_what_a_refused_step_should_have_written_is_not_used(engines):
    model = ToyModel(slots=1, max_len=64)
    engine = engines(model)
    model.fail = Mock(side_effect=chain([InputMismatchError("no")], repeat(None)))
    assert isinstance(ask(engine, SYSTEM, LONG).end.error, GenerationError)
    answer = ask(engine, SYSTEM, LONG)
    assert answer.tokens[0] == naive(SYSTEM) and cached(answer) == 0


def test_what_a_step_should_have_written_for_an_answer_that_had_ended_is_not_used(engines):
    """Its next step was in flight when it stopped, and is refused."""
    model = ToyModel(slots=1, max_len=64, ahead=True)
    engine = engines(model)
    expected, refused = naive(SYSTEM), []

    def fail(name, inputs):
        if 22 in inputs["start"]:
            model.fail = lambda name, inputs: refused.append(name)
            raise InputMismatchError("no")

    model.fail = fail
    answer = ask(engine, SYSTEM, LONG.replace(stop_token_ids=[expected[2]]))
    assert answer.tokens[0] == expected[:3] and answer.end.reason == "stop"
    talk = [*SYSTEM, *expected[:3], 1, 2]
    answer = ask(engine, talk, LONG)
    assert answer.tokens[0] == naive(talk) and refused


def test_only_requests_with_the_same_salt_share(engines):
    engine = engines(ToyModel(slots=4, max_len=64))
    for salt, expected in ((None, 0), ("a", 0), ("b", 0), ("a", 19), (None, 19)):
        answer = ask(engine, SYSTEM, LONG.replace(cache_salt=salt))
        assert answer.tokens[0] == naive(SYSTEM) and cached(answer) == expected
    with pytest.raises(RequestError, match="cache_salt: must be a string, got 3"):
        SamplingParams(cache_salt=3)


def test_without_prefix_caching_everything_is_computed(engines):
    engine = engines(ToyModel(slots=2), prefix_caching=False)
    for _ in range(3):
        answer = ask(engine, SYSTEM, LONG)
        assert answer.tokens[0] == naive(SYSTEM) and cached(answer) == 0
