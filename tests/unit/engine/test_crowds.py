"""Many who wait: in which order they begin, how much may wait, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_server.accounts import Account
from nxd_server.engine import SamplingParams
from nxd_server.engine.admission import WholeRequest
from nxd_server.engine.fair_queue import FairQueue
from nxd_server.errors import QueueFullError, RateLimitError
from tests.support.engine.asking import GREEDY, held
from tests.support.engine.schedules import scheduler, sequence, steps
from tests.support.engine.toy_model import Listener, ToyModel
from tests.support.engine.toy_oneshot import ToyOneShot
from tests.support.processes import wait_until

ALICE, BOB = "alice", "bob"


@pytest.fixture
def whole():
    """Makes requests of accounts by name; asked for after the engines, so that they are over before these end."""
    accounts, made = {}, []

    def make(name, priority=0):
        made.append(WholeRequest(accounts.setdefault(name, Account(name))))
        made[-1].priority = priority
        return made[-1]

    yield make
    for one in made:
        one.close()


def item(id, owner, priority=0, cost=1):
    return SimpleNamespace(id=id, whole=SimpleNamespace(owner=owner, priority=priority), cost=cost)


def naive_order(waiting, given):
    """One after the other: of the account with the fewest tokens, the first of its own."""
    waiting, given, order = list(waiting), dict(given), []
    while waiting:
        owner = min({one.whole.owner for one in waiting}, key=lambda owner: (given.get(owner, 0), owner))
        own = [one for one in waiting if one.whole.owner == owner]
        first = min(own, key=lambda one: (one.whole.priority, one.id))
        waiting.remove(first)
        order.append(first)
        given[owner] = given.get(owner, 0) + first.cost
    return order


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 9), st.sampled_from(["add", "gone", "run"])
        ),
        max_size=30,
    )
)
def test_the_order_is_that_of_a_queue_that_looks_at_everything(events):
    queue, there, given = FairQueue(), [], {}
    for number, (owner, priority, cost, what) in enumerate(events):
        if what == "add" or not there:
            one = item(number, owner, priority, cost)
            if there and owner not in (active := {other.whole.owner for other in there}):
                given[owner] = max(given.get(owner, 0), min(given.get(other, 0) for other in active))
            queue.add(one)
            there.append(one)
        else:
            one = there.pop(cost % len(there)) if what == "gone" else naive_order(there, given)[0]
            assert queue.remove(one) and not queue.remove(one)
            if what == "run":
                there.remove(one)
                queue.charge(one, one.cost)
                given[one.whole.owner] = given.get(one.whole.owner, 0) + one.cost
        assert list(queue.in_order()) == naive_order(there, given)
        assert len(queue) == len(there) == len(list(queue))


def test_slots_go_to_who_was_given_less_and_nobody_saves_up():
    subject = scheduler(slots=2)

    def ask(owner, *identities):
        for identity in identities:
            one = sequence(identity, 8, 100)
            one.ticket.whole = WholeRequest(Account(owner))
            subject.add(one)

    def turn():
        """The next two begin, and run for a while."""
        for one in [*subject.sequences()][: subject.running]:
            subject.remove(one)
        begun = [one.id for one in subject.admit()]
        steps(subject, 50)
        return sorted(begun)

    ask(ALICE, 0, 1)
    assert turn() == [0, 1]
    ask(ALICE, *range(2, 20))
    ask(BOB, 20, 21, 22)
    assert [turn(), turn()] == [[2, 20], [3, 21]], "bob begins level with alice, who was given a hundred tokens"


def test_a_wait_that_is_too_long_is_foretold_by_what_the_last_ones_took(engines, whole):
    engine = engines(model := ToyModel(slots=1, delay=0.01), max_queue_wait=300)

    def submit(name, timeout=None):
        return engine.submit([1] * 8, GREEDY, Listener(), whole=whole(name), timeout=timeout)

    with held(model):
        tickets = [submit(ALICE) for _ in range(6)]  # 0.1 s each at least
    assert all(ticket.wait(60) for ticket in tickets)
    with held(model):
        tickets = [submit(ALICE) for _ in range(9)]
        wait_until(lambda: engine.stats().running == 1)
        with pytest.raises(QueueFullError, match=r"64 prompt tokens are waiting, .* would begin in") as caught:
            submit(ALICE, timeout=0.2)
        assert caught.value.retry_after >= 1 and engine.stats().rejected["queue_full"] == 1
        tickets += [submit(ALICE, timeout=600), submit(BOB, timeout=60)]  # bob's turn is next
    assert all(ticket.wait(60) for ticket in tickets)


@pytest.mark.parametrize("limit", [{"max_queued_tokens": 60}, {"max_queued_requests": 6}])
def test_no_account_fills_the_queue_for_the_others(engines, whole, limit):
    engine = engines(model := ToyModel(slots=1), **limit)
    tickets = []

    def fill(name):
        before = len(tickets)
        with pytest.raises(QueueFullError, match="are waiting and at most 6"):
            while True:
                tickets.append(engine.submit([1] * 10, GREEDY, Listener(), whole=whole(name)))
        return len(tickets) - before

    with held(model):
        tickets.append(engine.submit([1], GREEDY, Listener()))
        wait_until(lambda: engine.stats().running == 1)
        assert [fill(name) for name in (ALICE, BOB, "carol", ALICE)] == [6, 3, 2, 0]
    assert all(ticket.wait(60) for ticket in tickets)


def test_one_shot_requests_begin_in_a_fair_order_too(oneshot_engines, whole):
    engine = oneshot_engines(ToyOneShot(batches=(1,)), max_queued_tokens=400)
    order = []

    def submit(name, priority=0):
        ids = torch.ones(1, 8, dtype=torch.int64)
        future = engine.submit({"input_ids": ids, "attention_mask": ids}, whole=whole(name, priority))
        future.add_done_callback(lambda _: order.append(name if priority == 0 else "urgent"))
        return future

    with held(engine.model):
        futures = [submit(ALICE)]
        wait_until(lambda: engine.health().step_running is not None)
        futures += [submit(ALICE) for _ in range(20)]
        futures += [submit(BOB), submit(ALICE, -1)]
        wait_until(lambda: engine.stats().waiting == 22)
        assert engine.stats().waiting_tokens == 22 * 8
    for future in futures:
        future.result(60)
    assert order.index(BOB) <= 2 and order.index("urgent") <= 2


def test_what_was_used_counts_whatever_became_of_the_request(engines, whole):
    engine = engines(ToyModel(slots=1, max_len=64))
    account = whole(ALICE).account
    account.allow(requests=None, tokens=20, running=None)
    ticket = engine.submit([1] * 8, SamplingParams(max_tokens=50, ignore_eos=True), Listener(), whole=whole(ALICE))
    assert ticket.wait(60)
    assert (account.prompt_tokens, account.generated_tokens) == (8, 50)
    with pytest.raises(RateLimitError, match="'alice' has 20 tokens a minute") as caught:
        engine.submit([1], GREEDY, Listener(), whole=whole(ALICE))
    assert 100 < caught.value.retry_after <= 117, "58 tokens of which 20 are free, at three seconds each"
    account.allow(requests=None, tokens=None, running=None)
    part = whole(ALICE)
    for _ in range(2):
        assert engine.submit([1] * 5, GREEDY.replace(n=3), Listener(3), whole=part).wait(60)
        assert account.prompt_tokens == 8 + 5, "once, however many choices and copies of the model"
        part.close()
        part = part.again()  # as one that moves to another copy
    assert engine.submit([1], GREEDY, Listener(), whole=whole(ALICE)).wait(60)
