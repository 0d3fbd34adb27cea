"""The scheduler alone: streams are not held up beyond the bound while prompts are read."""

from __future__ import annotations

from tests.support.engine.schedules import arrive, decoding, scheduler, sequence, steps


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
        subject.complete(step, subject.costs[step.graph.name])
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
