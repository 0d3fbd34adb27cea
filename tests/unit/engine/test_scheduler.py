"""The scheduler alone: every choice ends once, slots never leak or collide, each step takes the graph that suits it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_server.engine.request import Sequence
from nxd_server.engine.scheduler import UNKNOWN, Step
from tests.support.engine.schedules import arrive, decoding, scheduler, sequence, steps

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


@given(
    arrivals=arrivals,
    slots=st.integers(1, 5),
    batches=st.sampled_from([(1,), (1, 2, 4), (2,), (4,)]),
    lengths=st.sampled_from([(8, 16), (8,), (), (4, 8, 16, 32)]),
    ratio=st.sampled_from([0.5, 4.0, 1e6]),
    mixes=st.booleans(),
    pipeline=st.sampled_from([(1, 1), (1, 2), (2, 3), (3, 4), (2, 1)]),
    bound=st.sampled_from([(), (0,), (0, 1)]),
)
@settings(max_examples=150)
def test_any_traffic_is_served_exactly_once_within_the_bounds(
    arrivals, slots, batches, lengths, ratio, mixes, pipeline, bound
):
    """Arrivals are (time, prompt length, new tokens at most, time of cancellation, tokens until it stops by itself).
    ``pipeline``: stages, and how many steps are planned before the tokens of the first are known. ``bound``: which of
    even and odd choices follow a grammar."""
    groups, depth = pipeline
    subject = scheduler(slots, batches, lengths, ratio=ratio, mixes=mixes, groups=groups)
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    waiting = dict(enumerate(arrivals))
    live: dict[int, Sequence] = {}
    finished: dict[int, str] = {}
    order: list[int] = []
    under_way: list[Step] = []

    def land(step):
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
            live[identity].guide = object() if identity % 2 in bound else None
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
        fed = {row.sequence.id: row.sequence.computed for row in step.rows}
        for row in step.rows:
            assert row.sequence.id in live, "a step for a finished choice"
            assert row.start == fed[row.sequence.id] and 1 <= row.length <= step.graph.length
            assert row.samples == (row.start + row.length >= len(row.sequence.prompt))
            fed[row.sequence.id] += row.length
            place = row.start + row.length - len(row.sequence.prompt)
            assert place < row.sequence.max_new_tokens, "a step for a token that nobody wants"
            if groups > 1 or row.sequence.guide is not None:
                assert UNKNOWN not in row.tokens()
            elif row.tokens() == [UNKNOWN]:  # the token behind all that are known, which the step under way gives
                assert row.start == len(row.sequence.prompt) + len(row.sequence.output)
                assert [it.samples for it in under_way[-1].rows if it.sequence is row.sequence][-1:] == [True]
            else:
                assert len(row.tokens()) == row.length and UNKNOWN not in row.tokens()
        subject.begin(step)
        under_way.append(step)
    assert set(finished) == set(range(len(arrivals)))
    assert subject.slots.free == slots and subject.waiting == subject.live_tokens == 0
    expected = sorted(order, key=lambda identity: (max(arrivals[identity][0], 0), identity))
    assert order == expected, "slots are given in order of arrival"


@pytest.mark.parametrize(
    ("prompt", "pieces"),
    [
        (1, ["decode_b1"]),
        (8, ["prefill_s8"]),
        (9, ["prefill_s16"]),
        (17, ["prefill_s16", "decode_b1"]),
        (40, ["prefill_s16", "prefill_s16", "prefill_s8"]),
    ],
)
def test_a_prompt_goes_in_pieces_and_a_length_equal_to_a_bucket_runs_in_it(prompt, pieces):
    subject = scheduler(batches=(1,), seconds={"prefill_s8": 0.6, "prefill_s16": 1.0, "decode_b1": 0.5})
    arrive(subject, sequence(0, prompt))
    taken = []
    while (step := subject.next_step()).kind == "prefill":
        taken.append(step.graph.name)
        assert len(step.rows) == 1
        subject.begin(step)
    assert taken == pieces


def test_a_piece_is_split_only_where_measured_times_say_it_is_clearly_cheaper():
    costly = scheduler(lengths=(8, 128), seconds={"prefill_s8": 0.01, "prefill_s128": 0.10})
    assert costly.piece(20) == 8  # three steps of 8 instead of 128
    assert costly.piece(100) == 128
    assert costly.piece(128) == 128
    level = scheduler(lengths=(8, 16), seconds={"prefill_s8": 0.01, "prefill_s16": 0.021})
    assert level.piece(9) == 16  # two of 8 are a little cheaper, which may be noise
    assert level.piece(16) == 16


@pytest.mark.parametrize(("prompt", "length"), [(1, 8), (8, 8), (9, 16), (16, 16)])
def test_a_prompt_that_is_read_whole_is_one_piece_whatever_it_costs(prompt, length):
    """Small pieces are cheaper here, decoding waits, and a graph of one token would hold the shortest prompt."""
    seconds = {"prefill_s16": 1.0, "prefill_s8": 0.01, "decode_b1": 0.001}
    subject = scheduler(slots=4, seconds=seconds, whole_prompts=True)
    decoding(subject, 2)
    arrive(subject, sequence(9, prompt))
    while (step := subject.next_step()).kind != "prefill":
        subject.begin(step)
    (row,) = step.rows
    assert (step.graph.length, row.start, row.length, row.samples) == (length, 0, prompt, True)


@pytest.mark.parametrize(
    ("rows", "seconds", "graph"),
    [
        (1, (1.0, 1.1, 1.2), "decode_b1"),
        (3, (1.0, 1.1, 1.2), "decode_b4"),
        (3, (1.0, 1.1, 9.0), "decode_b2"),
        (1, (5.0, 3.0, 9.0), "decode_b2"),
        (1, (5.0, 4.5, 9.0), "decode_b1"),
    ],
)
def test_a_decode_step_takes_the_graph_with_the_most_rows_per_second(rows, seconds, graph):
    costs = dict(zip(("decode_b1", "decode_b2", "decode_b4"), seconds, strict=True))
    subject = scheduler(seconds={**costs, "prefill_s8": 0.1})
    decoding(subject, rows)
    last = steps(subject)[-1]
    assert last.kind == "decode" and last.graph.name == graph


def test_rows_beyond_the_largest_graph_take_turns():
    subject = scheduler(slots=6, batches=(1, 2))
    items = decoding(subject, 5)
    for item in items:
        item.computed = 4
    steps(subject, 50)
    advanced = [item.computed for item in items]
    assert max(advanced) - min(advanced) <= 1


def streaming(subject, count):
    """``count`` choices whose last tokens are known."""
    items = [sequence(identity, 4, 100) for identity in range(count)]
    arrive(subject, *items)
    while any(not item.output for item in items):
        give(begun(subject))


def begun(subject):
    step = subject.next_step()
    subject.begin(step)
    return step


def give(step):
    for row in step.rows:
        if row.samples:
            row.sequence.output.append(7)


def test_each_step_takes_its_share_and_waits_for_the_tokens_of_its_rows():
    subject = scheduler(slots=8, batches=(1, 2, 4, 8), groups=2)
    streaming(subject, 6)
    first, second = begun(subject), begun(subject)
    rows = [{row.sequence.id for row in step.rows} for step in (first, second)]
    assert [len(ids) for ids in rows] == [3, 3] and not rows[0] & rows[1]
    assert subject.next_step() is None, "all wait for their tokens"
    give(first)
    assert {row.sequence.id for row in subject.next_step().rows} == rows[0]


def test_a_prompt_advances_while_all_streams_are_under_way():
    """So does its next piece, once each stream has advanced, although decoding has not taken its share of the time."""
    subject = scheduler(slots=8, batches=(1, 2, 4, 8), ratio=1, groups=2)
    streaming(subject, 2)
    under_way = [begun(subject), begun(subject)]
    arrive(subject, sequence(10, prompt=40, new=4))
    piece = begun(subject)
    assert piece.kind == "prefill" and piece.rows[0].length <= 16
    for step in under_way:
        assert subject.next_step() is None, "a stream has not advanced since the piece before"
        give(step)
        assert begun(subject).kind == "decode"
    assert subject.next_step().kind == "prefill"


# --- streams are not held up beyond the bound while prompts are read ---


def test_a_piece_beside_streams_is_short_enough_to_keep_them_going():
    times = {"decode_b1": 0.010, "decode_b2": 0.011, "decode_b4": 0.012}
    times |= {"prefill_s16": 0.015, "prefill_s64": 0.0185, "prefill_s128": 0.1}
    subject = scheduler(lengths=(16, 64, 128), seconds=times, ratio=1e6)
    assert subject.piece(128) == 128  # nobody waits
    decoding(subject, 1)
    assert subject.piece(128) == subject.piece(64) == 64  # 18.5 ms and a step of 11 are clearly less than four of 10
    others = [sequence(identity, 128) for identity in range(1, 4)]
    arrive(subject, *others)
    waits, since, pieces = [], 0.0, set()
    while any(other.remaining for other in others):
        (step,) = steps(subject, 1)
        since += times[step.graph.name]
        if step.kind == "decode":
            waits.append(since / times["decode_b1"])
            since = 0.0
        else:
            pieces.add(step.graph.length)
    assert max(waits) <= 4 + 1e-9
    assert pieces == {16, 64}  # beside three streams, whose step takes 12 ms, there is no room for 18.5


def test_tokens_of_prompts_take_the_rows_that_decoding_leaves():
    times = {"decode_b1": 0.010, "decode_b4": 0.012, "prefill_s8": 0.0175}
    subject = scheduler(slots=6, batches=(1, 4), lengths=(8,), seconds=times, mixes=True)
    decoding(subject, 2)
    arrive(subject, sequence(8, 3, 100), sequence(9, 30, 100))
    seen = []
    while len(seen) < 4:
        step = subject.next_step()
        late = [(row.sequence.id, row.start, row.samples) for row in step.rows if row.sequence.id > 7]
        seen.append((step.kind, late))
        subject.begin(step)
    assert seen[0] == ("mixed", [(8, 0, False), (8, 1, False)])  # the piece of a prompt before has to be paid for
    assert seen[1] == ("prefill", [(8, 2, True), (9, 0, False)])
    assert seen[2] == ("mixed", [(8, 3, True), (9, 1, False)])  # three choices decode, and one row is left
    assert seen[3] == ("prefill", [(9, 2, False)])


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


def test_a_piece_is_never_shorter_than_the_shortest_bucket_and_the_bound_can_be_lifted():
    times = {"decode_b1": 0.010, "prefill_s128": 0.1, "prefill_s512": 0.5}
    subject = scheduler(lengths=(128, 512), batches=(1,), seconds=times)
    decoding(subject, 1)
    assert subject.piece(512) == subject.piece(300) == 128
    subject.stall_ratio = float("inf")
    assert subject.piece(512) == 512
