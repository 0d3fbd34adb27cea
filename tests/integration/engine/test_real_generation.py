"""A tiny traced Llama behind the engine, at degree 1 and 2: what transformers generates, whatever shares the batch."""

from __future__ import annotations

import os
import signal
import tempfile
import threading

import pytest

from nxd_infer.runtime.rank_model import RankModel
from nxd_infer.util.processors import available_cores, processor_share
from nxd_server import LLM, SamplingParams
from nxd_server.engine import Engine
from nxd_server.engine.events import FinishEvent, TokenEvent
from nxd_server.errors import EngineFailedError, MaxTokensError, PromptTooLongError, RequestError
from nxd_server.threads import keep_off
from tests.support.engine.real_artifacts import MAX_LEN, PROMPT_BUCKETS, costs_of, reference_generate, trace_llama
from tests.support.engine.toy_model import Listener
from tests.support.processes import wait_until

LENGTHS = sorted({1, 2, *(bucket + more for bucket in PROMPT_BUCKETS for more in (-1, 0, 1)), 33, 48, 60, 63, 64})
GREEDY = SamplingParams(max_tokens=16, temperature=0)


def prompt_of(length, shift=0):
    return [5 + (7 * place + 3 * length + shift) % 280 for place in range(length)]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generation")
    return {tp: trace_llama(directory, tp) for tp in (1, 2)}


@pytest.fixture(scope="module")
def reference(traced):
    pytest.importorskip("transformers")
    return dict(zip(LENGTHS, reference_generate(traced[1][0], [prompt_of(n) for n in LENGTHS], 16), strict=True))


@pytest.fixture(scope="module", params=[1, 2])
def llm(request, traced):
    artifact = traced[request.param][1]
    with LLM(artifact, costs=costs_of(artifact)) as llm:
        yield llm


def test_greedy_tokens_equal_those_of_transformers_for_every_kind_of_length(llm, reference):
    prompts = [prompt_of(length) for length in LENGTHS]
    outputs = llm.generate(prompts, [GREEDY.replace(max_tokens=min(16, llm.room(prompt))) for prompt in prompts])
    for length, output in zip(LENGTHS, outputs, strict=True):
        expected, gap = reference[length]
        if gap >= 1e-5:
            assert output.outputs[0].token_ids == expected, f"prompt of {length}"
        assert output.usage.prompt_tokens == length
        assert output.outputs[0].text == llm.tokenizer.decode(expected)


def own_cores(pid: int) -> set[int]:
    """The cores that some thread of the process keeps to."""
    kept = [os.sched_getaffinity(int(task)) for task in os.listdir(f"/proc/{pid}/task")]
    return {core for cores in kept for core in cores if len(cores) == 1}


@pytest.mark.parametrize(("degree", "threads"), [(1, 2), (2, 1)])
def test_threads_keep_to_their_cores_and_the_engine_off_the_first(traced, tmp_path, monkeypatch, degree, threads):
    """Of a rank of several threads: all of it waits for the first one, and goes on without any of the others. Also once
    the engine's thread, which keeps to fewer cores, has started the ranks again."""
    everywhere = set(available_cores())
    if len(everywhere) < 2 or processor_share() < len(everywhere):
        pytest.skip("ranks of two threads do not keep to cores here")
    monkeypatch.delenv("NXD_INFER_PIN", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # no other process has claimed cores here

    def start_again(model):
        keep_off(model.lead_cores)
        model.restart()

    with LLM(traced[degree][1], threads_per_rank=threads) as llm:
        llm.generate(prompt_of(5), GREEDY)
        leads = llm.model.lead_cores
        assert len(leads) == (1 if threads > 1 else 0)
        assert os.sched_getaffinity(llm.engine.thread.native_id) == everywhere - set(leads)
        assert os.sched_getaffinity(0) == everywhere  # the caller's own threads are left alone
        for again in (False, True):
            if again:
                restart = threading.Thread(target=start_again, args=(llm.model,))
                restart.start()
                restart.join(300)
                assert not restart.is_alive() and llm.model.lead_cores == leads
            for rank in llm.model.health():
                # A thread keeps to its core from its first moment on, which comes when the system has time for it.
                wait_until(lambda pid=rank.pid: len(own_cores(pid)) == threads)
                assert not leads or os.sched_getaffinity(rank.pid) == set(leads)


def test_a_length_equal_to_a_bucket_runs_in_that_bucket(llm):
    for bucket in PROMPT_BUCKETS:
        before = llm.engine.stats().bucket_steps
        llm.generate(prompt_of(bucket), GREEDY.replace(max_tokens=1))
        after = llm.engine.stats().bucket_steps
        changed = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
        assert changed == {f"prefill_s{bucket}": 1}


def test_batch_mates_never_change_a_greedy_or_seeded_answer(llm):
    asked = [
        (prompt_of(11), GREEDY),
        (prompt_of(20), SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, seed=11)),
        (prompt_of(5), SamplingParams(max_tokens=16, temperature=1.3, top_k=20, seed=12, frequency_penalty=0.5)),
    ]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in asked]
    crowd = [(prompt_of(3 + n, n), SamplingParams(max_tokens=8, temperature=1.0, seed=n)) for n in range(9)]
    mixed = [pair for three in range(3) for pair in (*crowd[3 * three : 3 * three + 3], asked[three])]
    outputs = llm.generate([prompt for prompt, _ in mixed], [params for _, params in mixed])
    assert [outputs[place].outputs[0].token_ids for place in (3, 7, 11)] == alone


def test_prompts_that_ride_in_rows_of_a_decode_step_change_no_answer(llm, traced):
    """With a bound on stalls, tokens of prompts take rows that decoding leaves; penalties see the same tokens."""
    asked = [
        (prompt_of(5), GREEDY.replace(max_tokens=40, ignore_eos=True)),
        (prompt_of(30), SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)),
        (prompt_of(20), SamplingParams(max_tokens=12, temperature=1.3, seed=12, repetition_penalty=1.5)),
        (prompt_of(27), SamplingParams(max_tokens=12, temperature=1.0, seed=13, frequency_penalty=0.5)),
    ]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in asked]
    artifact, all_there = traced[llm.model.tp_degree][1], threading.Event()
    with LLM(artifact, stall_ratio=1.0, costs=costs_of(artifact)) as bounded:
        bounded.engine.submit([9], GREEDY.replace(max_tokens=1), lambda event: all_there.wait(60))  # on its thread
        listeners = [Listener() for _ in asked]
        tickets = [bounded.engine.submit(*one, listener) for one, listener in zip(asked, listeners, strict=True)]
        all_there.set()
        assert all(ticket.wait(60) for ticket in tickets)
        stats = bounded.engine.stats()
    assert [listener.tokens[0] for listener in listeners] == alone
    assert stats.bucket_steps["mixed_b20"] > 0
    rows = sum(count for name, count in stats.useful_tokens.items() if not name.startswith("prefill"))
    assert rows > stats.generated_tokens, "no token of a prompt took a row"


@pytest.fixture(scope="module")
def ranks(llm, traced):
    """The same model, its ranks in processes at degree 1 too."""
    with LLM(traced[llm.model.tp_degree][1], in_process=False) as ranks:
        yield ranks


def test_steps_begun_ahead_over_all_ranks_change_no_answer(llm, ranks, monkeypatch):
    """As where the ranks leave a core. Without one, only a single rank's steps are begun ahead."""
    params = [
        GREEDY.replace(ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.9, seed=11, repetition_penalty=1.3),
        SamplingParams(max_tokens=9, temperature=1.3, seed=12, frequency_penalty=0.5, min_tokens=4),
    ]
    prompts = [prompt_of(5), prompt_of(30), prompt_of(20)]
    want = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    for spare in (0, 1):
        monkeypatch.setattr(RankModel, "spare_cores", spare)
        with Engine(ranks.model, ranks.tokenizer) as engine:
            depth = engine._batcher._steps.depth
            listeners = [Listener() for _ in prompts]
            tickets = [engine.submit(*asked) for asked in zip(prompts, params, listeners, strict=True)]
            assert all(ticket.wait(60) for ticket in tickets)
        assert [listener.tokens[0] for listener in listeners] == want
        assert depth == (2 if spare or ranks.model.tp_degree == 1 else 1)


def test_an_engine_that_is_closed_amid_a_step_leaves_the_model_to_the_next(ranks, monkeypatch):
    """The steps that it had begun are waited out; the next engine has both places of the arena again."""
    monkeypatch.setattr(RankModel, "spare_cores", 1)
    want = ranks.generate(prompt_of(9), GREEDY)[0].outputs[0].token_ids
    for _ in range(3):
        other = Engine(ranks.model, ranks.tokenizer)
        other.start()
        streaming = threading.Event()
        other.submit(
            prompt_of(3), GREEDY.replace(max_tokens=50, ignore_eos=True), lambda event, seen=streaming: seen.set()
        )
        assert streaming.wait(60)
        other.close()
        assert other.health().step_running is None
        with Engine(ranks.model, ranks.tokenizer) as engine:
            listener = Listener()
            assert engine.submit(prompt_of(9), GREEDY, listener).wait(60)
        assert listener.tokens[0] == want


@pytest.fixture(scope="module")
def seeded_answers():
    """What each degree answered to the same seed."""
    return []


def test_the_same_seed_gives_the_same_tokens_at_every_degree(llm, seeded_answers):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=2**40 + 3, n=2)
    first, second = llm.generate(prompt_of(9), params)[0].outputs
    assert first.token_ids != second.token_ids
    seeded_answers.append((first.token_ids, second.token_ids))
    assert seeded_answers[0] == seeded_answers[-1]


def test_penalties_count_the_answer_and_not_the_pieces_of_the_prompt(llm):
    """A strong presence penalty forbids repeating; a prompt in three pieces must not count as an answer."""
    prompt = prompt_of(40)
    plain = llm.generate(prompt, GREEDY.replace(ignore_eos=True))[0].outputs[0].token_ids
    once = llm.generate(prompt, GREEDY.replace(ignore_eos=True, logit_bias={plain[0]: 50}))[0].outputs[0].token_ids
    assert once == [plain[0]] * 16
    params = GREEDY.replace(ignore_eos=True, logit_bias={plain[0]: 3}, frequency_penalty=2, max_tokens=16)
    penalised = llm.generate(prompt, params)[0].outputs[0].token_ids
    assert penalised[0] == plain[0] and penalised != once


def test_min_tokens_masks_and_logprobs_come_from_the_raw_distribution(llm):
    eos = llm.engine.eos_token_ids[0]
    biased = GREEDY.replace(logit_bias={eos: 100}, logprobs=5, min_tokens=4)
    output = llm.generate(prompt_of(6), biased)[0].outputs[0]
    assert output.token_ids[-1] == eos and len(output.token_ids) == 5 and eos not in output.token_ids[:4]
    assert output.finish_reason == "stop" and output.stop is None
    for entry in output.logprobs:
        assert len(entry.top) == 5 and entry.top[0][1] >= entry.top[-1][1] and entry.logprob <= entry.top[0][1] + 1e-6


def test_text_chat_and_streams(llm):
    whole = llm.generate("The raise statement", GREEDY)[0]
    assert whole.prompt == "The raise statement" and whole.prompt_token_ids == llm.tokenizer.encode(whole.prompt)
    events = list(llm.stream("The raise statement", GREEDY))
    assert "".join(event.text for event in events) == whole.outputs[0].text
    assert all(isinstance(event, TokenEvent) for event in events[:-1]) and isinstance(events[-1], FinishEvent)
    conversation = [{"role": "user", "content": "Why?"}]
    (answer,) = llm.chat(conversation, GREEDY)
    rendered = llm.chat_template.render(conversation)
    assert answer.prompt_token_ids == llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert [one.outputs[0].token_ids for one in llm.chat([conversation] * 2, GREEDY, progress=True)] == [
        answer.outputs[0].token_ids
    ] * 2
    for event in llm.stream(prompt_of(3), GREEDY.replace(max_tokens=60, ignore_eos=True)):
        if event.index == 0:
            break  # leaving cancels
    wait_until(lambda: llm.engine.stats().running == 0)


def test_wrong_prompts_are_refused_and_the_engine_goes_on(llm):
    with pytest.raises(PromptTooLongError, match=f"{MAX_LEN + 1}.*{MAX_LEN}"):
        llm.generate([prompt_of(MAX_LEN + 1)], GREEDY)
    with pytest.raises(MaxTokensError, match=f"16 tokens do not fit.* {MAX_LEN} .*leaves 10"):
        llm.generate(prompt_of(MAX_LEN - 10), GREEDY)
    assert len(llm.generate(prompt_of(MAX_LEN - 10))[0].outputs[0].token_ids) <= 10, "a default is cut, not refused"
    for prompts in ([[1], []], [[10**6]], "\ud800"):
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="2 sets of parameters"):
        llm.generate([[1]], [GREEDY, GREEDY])
    assert llm.generate([], GREEDY) == []
    assert llm.generate([7, 8], GREEDY)[0].outputs[0].finish_reason in ("stop", "length")


def test_a_killed_rank_fails_what_runs_and_the_next_answer_is_right_again(traced, reference):
    from nxd_infer.trace import parallel_model_load

    with parallel_model_load(traced[2][1]) as model, Engine(model, idle_probe=None) as engine:
        ends, tokens, started, go_on = [], [], threading.Event(), threading.Event()

        def listen(event):
            if isinstance(event, TokenEvent):
                started.set()
                go_on.wait(60)  # on the engine's thread: none of them is over when the rank dies
            else:
                ends.append(event)

        endless = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        tickets = [engine.submit([9], endless, listen) for _ in range(12)]
        assert started.wait(60)
        os.kill(model.health()[1].pid, signal.SIGKILL)
        go_on.set()
        assert all(ticket.wait(60) for ticket in tickets)
        failed = [end for end in ends if not isinstance(end, FinishEvent)]
        assert failed and all(isinstance(end.error, EngineFailedError) for end in failed)
        wait_until(lambda: engine.state == "ready")
        length = 17

        def collect(event):
            if isinstance(event, TokenEvent):
                tokens.append(event.token)

        assert engine.submit(prompt_of(length), GREEDY, collect).wait(60)
        assert tokens == reference[length][0]
