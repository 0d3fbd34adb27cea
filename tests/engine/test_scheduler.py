"""The scheduler alone: every choice ends once, slots never leak or collide, prefill stays within its bound."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxd_server.engine.costs import Graph, StepCosts
from nxd_server.engine.params import SamplingParams
from nxd_server.engine.scheduler import UNKNOWN, Scheduler, Step
from nxd_server.engine.sequence import Sequence
from nxd_server.engine.slots import SlotPool

PARAMS = SamplingParams()


def graphs(batches=(1, 2, 4), lengths=(8, 16)):
    return [Graph(f"decode_b{b}", b, 1) for b in batches] + [Graph(f"prefill_s{s}", 1, s) for s in lengths]


def scheduler(slots=4, batches=(1, 2, 4), lengths=(8, 16), seconds=None, ratio=4.0, mixes=False):
    all_graphs = graphs(batches, lengths)
    costs = StepCosts(all_graphs)
    for graph in all_graphs:
        costs.set(graph.name, (seconds or {}).get(graph.name, 0.001 * graph.batch**0.5 * graph.length**0.8))
    return Scheduler(all_graphs, slots, costs, prefill_ratio=ratio, mixes=mixes)


def sequence(identity, prompt=4, new=4):
    return Sequence(identity, list(range(prompt)), PARAMS, new)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.integers(1, 50),
        st.integers(1, 12),
        st.one_of(st.none(), st.integers(0, 60)),
        st.integers(1, 24),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.check
@given(
    arrivals=arrivals,
    slots=st.integers(1, 5),
    batches=st.sampled_from([(1,), (1, 2, 4), (2,), (4,)]),
    lengths=st.sampled_from([(8, 16), (8,), (), (4, 8, 16, 32)]),
    ratio=st.sampled_from([0.5, 4.0, 1e6]),
    mixes=st.booleans(),
    depth=st.sampled_from([1, 2]),
)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_traffic_is_served_exactly_once_within_the_bounds(arrivals, slots, batches, lengths, ratio, mixes, depth):
    """Arrivals are (time, prompt length, new tokens at most, time of cancellation, tokens until it stops by itself).
    With a ``depth`` of 2 a step is planned before the tokens of the one before it are known."""
    subject = scheduler(slots, batches, lengths, ratio=ratio, mixes=mixes)
    waiting = dict(enumerate(arrivals))
    live: dict[int, Sequence] = {}
    finished: dict[int, str] = {}
    prefills_since_decode: dict[int, int] = {}
    last_prefill, decode_seconds = None, 0.0
    order: list[int] = []
    under_way: list[Step] = []

    def land(step):
        subject.complete(step, subject.costs[step.graph.name])
        for row in step.rows:
            item = row.sequence
            if row.samples and item.id in live:
                item.output.append(7)
                assert len(item.output) <= item.max_new_tokens, "a token that nobody wants"
                if len(item.output) in (item.max_new_tokens, arrivals[item.id][4]):
                    subject.remove(item)
                    assert item.id not in finished
                    finished[item.id] = "done"
                    del live[item.id]

    for clock in range(5000):
        for identity in [key for key, arrival in waiting.items() if arrival[0] <= clock]:
            _, prompt, new, _, _ = waiting.pop(identity)
            live[identity] = sequence(identity, prompt, new)
            subject.add(live[identity])
        for identity, item in list(live.items()):
            if arrivals[identity][3] is not None and arrivals[identity][3] <= clock:
                subject.remove(item)
                finished[identity] = "cancelled"
                del live[identity]
                assert item.slot is None
        order += [item.id for item in subject.admit()]
        held = [item.slot for item in live.values() if item.slot is not None]
        assert len(set(held)) == len(held) == subject.slots.used <= slots
        step = subject.next_step() if len(under_way) < depth else None
        if step is None:
            if under_way:
                land(under_way.pop(0))
                continue
            assert not live
            if not waiting:
                break
            continue
        assert 1 <= len(step.rows) <= step.graph.batch
        prompts = [row for row in step.rows if row.sequence.remaining]
        assert len({row.sequence.slot for row in step.rows}) == len(step.rows) or (mixes and step.kind == "mixed")
        assert (step.kind == "mixed") == (bool(prompts) and len(prompts) < len(step.rows))
        decoding = {item.id for item in live.values() if item.slot is not None and not item.remaining and item.goes_on}
        seconds = subject.costs[step.graph.name]
        if step.kind == "prefill":
            if decoding and last_prefill is not None:
                others = [prefills_since_decode[identity] for identity in decoding if identity in prefills_since_decode]
                assert all(count == 0 for count in others), "a second prefill before every stream advanced"
                if others:
                    assert decode_seconds * ratio >= last_prefill * 0.999
            last_prefill, decode_seconds = (seconds, 0.0) if decoding else (None, 0.0)
            prefills_since_decode = dict.fromkeys(decoding, 1)
        else:
            decode_seconds += seconds
        fed = {row.sequence.id: row.sequence.computed for row in step.rows}
        for row in step.rows:
            assert row.sequence.id in live, "a step for a finished choice"
            assert row.start == fed[row.sequence.id] and 1 <= row.length <= step.graph.length
            assert row.samples == (row.start + row.length >= len(row.sequence.prompt))
            fed[row.sequence.id] += row.length
            if step.kind != "prefill":
                prefills_since_decode[row.sequence.id] = 0
            place = row.start + row.length - len(row.sequence.prompt)
            assert place < row.sequence.max_new_tokens, "a step for a token that nobody wants"
            if row.tokens() == [UNKNOWN]:  # the token behind all that are known, which the step under way gives
                assert row.start == len(row.sequence.prompt) + len(row.sequence.output)
                assert [it.samples for it in under_way[-1].rows if it.sequence is row.sequence][-1:] == [True]
            else:
                assert len(row.tokens()) == row.length and UNKNOWN not in row.tokens()
        subject.begin(step)
        under_way.append(step)
    assert set(finished) == set(range(len(arrivals)))
    assert subject.slots.free == slots and not subject.busy and subject.live_tokens == 0
    expected = sorted(order, key=lambda identity: (max(arrivals[identity][0], 0), identity))
    assert order == expected, "slots are given in order of arrival"


@pytest.mark.check
@pytest.mark.parametrize(
    ("prompt", "pieces"),
    [
        (1, ["decode_b1"]),
        (7, ["prefill_s8"]),
        (8, ["prefill_s8"]),
        (9, ["prefill_s16"]),
        (16, ["prefill_s16"]),
        (17, ["prefill_s16", "decode_b1"]),
        (30, ["prefill_s16", "prefill_s16"]),
        (40, ["prefill_s16", "prefill_s16", "prefill_s8"]),
    ],
)
def test_a_prompt_goes_in_pieces_and_a_length_equal_to_a_bucket_runs_in_it(prompt, pieces):
    subject = scheduler(batches=(1,), seconds={"prefill_s8": 0.6, "prefill_s16": 1.0, "decode_b1": 0.5})
    subject.add(sequence(0, prompt))
    subject.admit()
    taken = []
    while (step := subject.next_step()).kind == "prefill":
        taken.append(step.graph.name)
        assert len(step.rows) == 1
        subject.begin(step)
        subject.complete(step, 1.0)
    assert taken == pieces


def test_a_piece_is_split_only_where_measured_times_say_it_is_clearly_cheaper():
    costly = scheduler(lengths=(8, 128), seconds={"prefill_s8": 0.01, "prefill_s128": 0.10})
    assert costly.piece(20) == 8  # three steps of 8 instead of 128
    assert costly.piece(100) == 128
    assert costly.piece(128) == 128
    level = scheduler(lengths=(8, 16), seconds={"prefill_s8": 0.01, "prefill_s16": 0.021})
    assert level.piece(9) == 16  # two of 8 are a little cheaper, which may be noise
    assert level.piece(16) == 16


def decoding(subject, count):
    """``count`` choices that have had their first token."""
    items = [sequence(identity, 4, 100) for identity in range(count)]
    for item in items:
        subject.add(item)
    subject.admit()
    while any(item.remaining for item in items):
        step = subject.next_step()
        subject.begin(step)
        subject.complete(step, subject.costs[step.graph.name])
    return items


@pytest.mark.check
def test_a_piece_beside_streams_is_short_enough_to_keep_them_going():
    times = {"decode_b1": 0.010, "decode_b2": 0.011, "decode_b4": 0.012}
    times |= {"prefill_s16": 0.015, "prefill_s64": 0.0185, "prefill_s128": 0.1}
    subject = scheduler(lengths=(16, 64, 128), seconds=times, ratio=1e6)
    assert subject.piece(128) == 128  # nobody waits
    decoding(subject, 1)
    assert subject.piece(128) == subject.piece(64) == 64  # 18.5 ms and a step of 11 are clearly less than four of 10
    others = [sequence(identity, 128) for identity in range(1, 4)]
    for other in others:
        subject.add(other)
    subject.admit()
    waits, since, pieces = [], 0.0, set()
    while any(other.remaining for other in others):
        step = subject.next_step()
        seconds = subject.costs[step.graph.name]
        subject.begin(step)
        subject.complete(step, seconds)
        since += seconds
        if step.kind == "decode":
            waits.append(since / times["decode_b1"])
            since = 0.0
        else:
            pieces.add(step.graph.length)
    assert max(waits) <= 4 + 1e-9
    assert pieces == {16, 64}  # beside three streams, whose step takes 12 ms, there is no room for 18.5


@pytest.mark.check
def test_tokens_of_prompts_take_the_rows_that_decoding_leaves():
    times = {"decode_b1": 0.010, "decode_b4": 0.012, "prefill_s8": 0.0175}
    subject = scheduler(slots=6, batches=(1, 4), lengths=(8,), seconds=times, mixes=True)
    decoding(subject, 2)
    first, second = sequence(8, 3, 100), sequence(9, 30, 100)
    for item in (first, second):
        subject.add(item)
    subject.admit()
    seen = []
    while len(seen) < 4:
        step = subject.next_step()
        late = [(row.sequence.id, row.start, row.samples) for row in step.rows if row.sequence.id > 7]
        seen.append((step.kind, late))
        subject.begin(step)
        subject.complete(step, subject.costs[step.graph.name])
    assert seen[0] == ("mixed", [(8, 0, False), (8, 1, False)])  # the piece of a prompt before has to be paid for
    assert seen[1] == ("prefill", [(8, 2, True), (9, 0, False)])
    assert seen[2] == ("mixed", [(8, 3, True), (9, 1, False)])  # three choices decode, and one row is left
    assert seen[3] == ("prefill", [(9, 2, False)])


@pytest.mark.check
@pytest.mark.parametrize(
    ("streams", "seconds"),
    [
        (4, {"decode_b1": 0.010, "decode_b4": 0.012, "decode_b24": 0.060, "prefill_s8": 0.05}),  # no row is left
        (1, {"decode_b1": 0.010, "decode_b4": 0.045, "decode_b24": 0.250, "prefill_s8": 0.05}),
    ],
)
def test_a_prompt_goes_on_where_the_graphs_that_leave_rows_for_it_are_slow(streams, seconds):
    subject = scheduler(slots=8, batches=(1, 4, 24), lengths=(8,), seconds=seconds, mixes=True)
    decoding(subject, streams)
    late = sequence(9, 8)
    subject.add(late)
    subject.admit()
    for _ in range(20):  # prefill's debt is paid by then
        step = subject.next_step()
        subject.begin(step)
        subject.complete(step, subject.costs[step.graph.name])
    assert late.remaining == 0


@pytest.mark.check
def test_decoding_alone_leaves_the_graph_with_more_rows_than_slots_to_prompts():
    """However little it seems to cost: its measured time may be off, and it verifies no guesses."""
    times = {"decode_b1": 0.010, "decode_b4": 0.012, "decode_b20": 0.001, "prefill_s8": 0.02}
    subject = scheduler(slots=3, batches=(1, 4, 20), lengths=(8,), seconds=times, mixes=True)
    decoding(subject, 3)
    assert subject.next_step().graph.name == "decode_b4"
    subject.add(sequence(9, 8))
    subject.remove(next(subject.sequences()))
    subject.admit()
    assert subject.next_step().graph.name == "decode_b20"


@pytest.mark.check
def test_tokens_of_prompts_take_no_graph_that_holds_up_streams_for_longer_than_a_piece():
    times = {"decode_b1": 0.008, "decode_b4": 0.009, "decode_b48": 0.040, "prefill_s8": 0.015}
    subject = scheduler(slots=32, batches=(1, 4, 48), lengths=(8,), seconds=times, mixes=True)
    decoding(subject, 1)
    late = sequence(9, 100)
    subject.add(late)
    subject.admit()
    longest = since = 0.0
    while late.remaining:
        step = subject.next_step()
        subject.begin(step)
        subject.complete(step, subject.costs[step.graph.name])
        since += subject.costs[step.graph.name]
        if any(row.sequence.id == 0 for row in step.rows):
            longest, since = max(longest, since), 0.0
    assert longest <= 4 * 0.008


WIDE = {"decode_b1": 0.0057, "decode_b4": 0.007, "decode_b16": 0.0105, "decode_b32": 0.0172, "prefill_s32": 0.0146}


@pytest.mark.check
@pytest.mark.parametrize(
    ("streams", "graph", "seconds"),
    [
        (1, "decode_b16", WIDE),
        (8, "decode_b16", WIDE),
        (9, "decode_b32", WIDE),
        (1, "decode_b20", {"decode_b1": 0.010, "decode_b4": 0.014, "decode_b20": 0.040, "prefill_s32": 0.060}),
    ],
)
def test_streams_are_not_held_up_beyond_the_bound_unless_prompts_crawl(streams, graph, seconds):
    """Three quarters of four steps are planned: 17.1 ms of 5.7."""
    batches = tuple(int(name.removeprefix("decode_b")) for name in seconds if name.startswith("decode"))
    subject = scheduler(batches[-2], batches, (32,), seconds=seconds, mixes=True)
    decoding(subject, streams)
    subject.add(sequence(9, 128))
    subject.admit()
    kinds = []
    for _ in range(20):  # the piece of a prompt before has to be paid for
        step = subject.next_step()
        kinds.append((step.kind, step.graph.name))
        subject.begin(step)
        subject.complete(step, subject.costs[step.graph.name])
    assert next(name for kind, name in kinds if kind == "mixed") == graph


@pytest.mark.check
def test_a_burst_of_prompts_keeps_to_the_bound_at_little_cost():
    times = {"decode_b1": 0.0057, "decode_b4": 0.007, "decode_b16": 0.0105, "decode_b32": 0.0172}
    times |= {"prefill_s32": 0.0146, "prefill_s128": 0.0538}

    def burst(batches, mixes):
        """Seconds until all answers are there, and the longest wait of the stream in steps of its own."""
        subject = scheduler(16, batches, (32, 128), seconds=times, mixes=mixes)
        decoding(subject, 1)
        for identity in range(1, 16):
            subject.add(sequence(identity, 128, 64))
        subject.admit()
        total = since = longest = 0.0
        while subject.running > 1:
            step = subject.next_step()
            seconds = subject.costs[step.graph.name]
            subject.begin(step)
            subject.complete(step, seconds)
            total, since = total + seconds, since + seconds
            for row in step.rows:
                row.sequence.output += [7] * row.samples
                if row.sequence.id == 0:
                    longest, since = max(longest, since), 0.0
                elif len(row.sequence.output) == 64:
                    subject.remove(row.sequence)
        return total, longest / times["decode_b1"]

    (plain, stall), (mixed, bounded) = burst((1, 4, 16), False), burst((1, 4, 16, 32), True)
    assert bounded <= 3 and stall > 4 and mixed < 1.15 * plain


@pytest.mark.check
def test_a_piece_is_never_shorter_than_the_shortest_bucket_and_the_bound_can_be_lifted():
    times = {"decode_b1": 0.010, "prefill_s128": 0.1, "prefill_s512": 0.5}
    subject = scheduler(lengths=(128, 512), batches=(1,), seconds=times)
    decoding(subject, 1)
    assert subject.piece(512) == subject.piece(300) == 128
    subject.stall_ratio = float("inf")
    assert subject.piece(512) == 512


@pytest.mark.check
@pytest.mark.parametrize(
    ("rows", "seconds", "graph"),
    [
        (1, {"decode_b1": 1.0, "decode_b2": 1.1, "decode_b4": 1.2}, "decode_b1"),
        (2, {"decode_b1": 1.0, "decode_b2": 1.1, "decode_b4": 1.2}, "decode_b2"),
        (3, {"decode_b1": 1.0, "decode_b2": 1.1, "decode_b4": 1.2}, "decode_b4"),
        (3, {"decode_b1": 1.0, "decode_b2": 1.1, "decode_b4": 9.0}, "decode_b2"),
        (4, {"decode_b1": 1.0, "decode_b2": 5.0, "decode_b4": 9.0}, "decode_b1"),
        (1, {"decode_b1": 5.0, "decode_b2": 3.0, "decode_b4": 9.0}, "decode_b2"),
        (1, {"decode_b1": 5.0, "decode_b2": 4.5, "decode_b4": 9.0}, "decode_b1"),
    ],
)
def test_a_decode_step_takes_the_graph_with_the_most_rows_per_second(rows, seconds, graph):
    subject = scheduler(seconds={**seconds, "prefill_s8": 0.1})
    decoding(subject, rows)
    for _ in range(20):  # prefill's debt is paid by now
        step = subject.next_step()
        subject.begin(step)
        subject.complete(step, subject.costs[step.graph.name])
    assert step.kind == "decode" and step.graph.name == graph


def test_rows_beyond_the_largest_graph_take_turns():
    subject = scheduler(slots=6, batches=(1, 2))
    items = decoding(subject, 5)
    for item in items:
        item.computed = 4
    for _ in range(50):
        step = subject.next_step()
        subject.begin(step)
        subject.complete(step, subject.costs[step.graph.name])
    advanced = [item.computed for item in items]
    assert max(advanced) - min(advanced) <= 1


def test_a_removed_row_in_a_running_step_is_skipped_and_its_slot_is_free():
    subject = scheduler(slots=1)
    item = sequence(0, 20)
    subject.add(item)
    subject.admit()
    step = subject.next_step()
    subject.begin(step)
    subject.remove(item)
    subject.remove(item)
    subject.complete(step, 0.1)
    assert subject.slots.free == 1 and subject.next_step() is None and subject.live_tokens == 0


def test_costs_follow_measurements_and_one_outlier_changes_little():
    costs = StepCosts(graphs())
    costs.observe("decode_b1", 0.01)
    assert costs["decode_b1"] == 0.01
    costs.observe("decode_b1", 100.0)
    assert costs["decode_b1"] < 0.012
    for _ in range(200):
        costs.observe("decode_b1", 0.02)
    assert costs["decode_b1"] == pytest.approx(0.02, rel=0.01)


def test_a_graph_that_was_slow_on_a_busy_machine_gets_another_chance():
    costs = StepCosts(graphs())
    costs.set("decode_b1", 0.01)
    costs.set("decode_b4", 0.02)
    for _ in range(100):
        costs.observe("decode_b1", 0.05)
    assert costs["decode_b1"] > 0.04
    for _ in range(2000):
        costs.observe("decode_b4", 0.02)
    assert costs["decode_b1"] < 0.011


def test_a_slot_cannot_be_released_twice():
    pool = SlotPool(2)
    slot = pool.allocate()
    pool.release(slot)
    with pytest.raises(KeyError):
        pool.release(slot)
    assert [pool.allocate(), pool.allocate()] == [0, 1]
    with pytest.raises(IndexError):
        pool.allocate()
    with pytest.raises(ValueError, match="at least one slot"):
        SlotPool(0)
