"""Targets served with EAGLE heads that know nothing or have learnt: answers are the targets' own, and guesses come
right as a naive simulation of the head foretells."""

from __future__ import annotations

import hashlib

import pytest
import torch

import nxd_infer as nxd
from nxd_infer.errors import ModelConfigError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.trace import parallel_model_load
from nxd_models.serving import tasks
from nxd_server import LLM, SamplingParams
from nxd_server.engine.draft_head import DraftHead
from nxd_server.engine.draft_model import check_draft
from nxd_server.engine.rank_restarts import RankRestarts
from nxd_server.engine.sampling_params import Sampler
from nxd_server.engine.scheduler import Row
from tests.support import eagle_heads
from tests.support.eagle_heads import COUNT, PROMPTS, models, write_target
from tests.support.engine.schedules import sequence
from tests.support.shared import shared

GUESSES = 3
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
DRAWN = GREEDY.replace(temperature=0.8, seed=5, top_p=0.95)
SHAPES = {"batch_sizes": (1, 2), "prompt_buckets": (8,), "max_len": 96, "speculate": GUESSES, "dtype": torch.float32}


def traced(name, tp, **options):
    """The artifact of the target or of a head."""
    root = models()
    of = {} if name == "target" else {"head_of": root / "target"}

    def make(folder):
        plan = tasks.plan(root / name, **of, **{**SHAPES, **options})
        arguments = {"tp_degree": tp, "backend": "eager", "artifact_dir": folder / "artifact"}
        nxd.trace.parallel_model_trace(**plan.trace_arguments(), **arguments).close()

    words = hashlib.sha256(repr((name, tp, sorted(options.items()))).encode()).hexdigest()[:12]
    return shared(f"eagle-{name}-{words}", make) / "artifact"


def costs_of(artifact, seconds):
    """One time for all graphs: guesses always pay, if the head's are next to nothing."""
    shapes = {bucket.name: bucket.inputs[0].shape for bucket in load_artifact(artifact).manifest.buckets}
    return {name: seconds * (1 + 1e-3 * s) for name, (_, s) in shapes.items()}


def guessing(kind, head, tp=(1, 1), sizes=(), **options):
    target = traced("target", tp[0], hidden_states=kind)
    draft = traced(f"{head}-{kind}", tp[1], **dict(sizes))
    costs = {"costs": costs_of(target, 1e-3), "draft_costs": costs_of(draft, 1e-7)}
    return LLM(target, draft=draft, **costs, **options)


def tokens(llm, prompts, params):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def simulated(kind, prompt, answer):
    """Guesses and right ones for one greedy answer, by the naive reference."""
    target, weights = models() / "target", torch.load(models() / f"learnt-{kind}.pt")
    text = [*prompt, *answer]
    features = eagle_heads.features(target, kind, text)
    known, tried, right = len(prompt) + 1, 0, 0
    while known < len(text):
        count = min(GUESSES, len(text) - known - 1)
        _, made = eagle_heads.chain(weights, text[1:known], features[: known - 1], count)
        same = [a == b for a, b in zip(made, text[known:], strict=False)]
        kept = same.index(False) if False in same else len(same)
        known, tried, right = known + kept + 1, tried + count, right + kept
    return tried, right


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "tp"), [("eagle", (1, 1)), ("eagle3", (2, 2))])
def test_guesses_of_a_head_that_has_learnt_come_right_as_foretold(kind, tp):
    expected = torch.load(models() / "answers.pt")
    with guessing(kind, "learnt", tp, prefix_caching=False) as llm:
        tried = right = 0
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert tokens(llm, [prompt], GREEDY) == [answer]
            counts = simulated(kind, prompt, answer)
            tried, right = tried + counts[0], right + counts[1]
            stats = llm.engine.stats()
            assert (stats.draft_tokens, stats.accepted_tokens) == (tried, right)
        assert right > 0.4 * tried, "it has learnt"
        assert tokens(llm, PROMPTS, GREEDY) == expected, "in slots that others used, two at a time"
        stats = llm.engine.stats()
        drafted, accepted = stats.draft_tokens - tried, stats.accepted_tokens - right
        assert accepted / drafted > 0.8 * right / tried


@pytest.mark.parametrize(("kind", "tp"), [("eagle3", (1, 1)), ("eagle", (2, 1))])
def test_a_head_changes_nothing_whatever_a_request_asks_for(kind, tp):
    """With heads that are rarely right, too; a conversation goes on in its slot."""
    asked = [GREEDY, DRAWN, GREEDY.replace(logprobs=2), GREEDY.replace(frequency_penalty=0.7), DRAWN.replace(n=2)]
    turns = [GREEDY.replace(max_tokens=12), DRAWN.replace(max_tokens=9), GREEDY.replace(max_tokens=14)]

    def answers(llm):
        made = [
            [one.token_ids for one in llm.generate(prompt, params)[0].outputs] for prompt in PROMPTS for params in asked
        ]
        said = list(PROMPTS[2])
        for turn, params in enumerate(turns):
            said += [*llm.generate(said, params)[0].outputs[0].token_ids, 30 + turn]
        return made + tokens(llm, PROMPTS * 2, DRAWN) + said

    with LLM(traced("target", tp[0], hidden_states=kind)) as plain:
        expected = answers(plain)
    for head in ("random", "learnt"):
        with guessing(kind, head, tp) as llm:
            assert answers(llm) == expected
            stats = llm.engine.stats()
            assert 0 < stats.accepted_tokens < stats.draft_tokens and llm._draft is not None and stats.reused_tokens > 0
            assert llm._draft.failure is None


def test_new_weights_of_the_model_have_their_own_answers_and_old_ones_their_guesses(tmp_path):
    kind, prompt = "eagle3", PROMPTS[2]
    files = [write_target(tmp_path, seed=1), models() / "target"]
    with guessing(kind, "learnt") as llm, LLM(traced("target", 1, hidden_states=kind)) as plain:
        for file in files:
            for one in (llm, plain):
                one.update_weights(file / "model.safetensors")
            before = llm.engine.stats()
            (answer,) = tokens(llm, [prompt], GREEDY)
            assert [answer] == tokens(plain, [prompt], GREEDY)
        stats = llm.engine.stats()
    guesses = stats.draft_tokens - before.draft_tokens, stats.accepted_tokens - before.accepted_tokens
    assert guesses == simulated(kind, prompt, answer), "nothing that it has read of the others is left"


def test_a_text_that_has_filled_the_heads_cache_goes_on_with_guesses_from_there():
    answers = torch.load(models() / "answers.pt")
    with guessing("eagle", "learnt", sizes={"max_len": 24}) as llm:
        assert tokens(llm, [PROMPTS[2]], GREEDY) == [answers[2]]
        # The prompt has 19 tokens: before the cache is full, fewer than five steps guess at most three each.
        assert llm.engine.stats().draft_tokens > 20 and llm.engine.stats().accepted_tokens > 0


def unread(head):
    """How many tokens' hidden states are kept for a head."""
    return sum(len(states) for read in head._read.values() for states in read.hidden)


def never_pays(**draft_costs):
    """A target and a head whose single steps take a second, or as said."""
    target, draft = traced("target", 1, hidden_states="eagle"), traced("learnt-eagle", 1)
    costs = {"costs": costs_of(target, 1e-3), "draft_costs": costs_of(draft, 1.0) | draft_costs}
    return LLM(target, draft=draft, in_process=False, **costs)


def test_states_that_nobody_will_read_are_not_kept():
    slow = {name: 1e-7 for name in costs_of(traced("learnt-eagle", 1), 1.0) if name.startswith("decode")}
    for draft_costs, prompt, params in (
        ({}, PROMPTS[2], GREEDY.replace(frequency_penalty=0.7)),
        (slow, PROMPTS[2], GREEDY),  # reading the prompt takes longer than guesses save
        ({}, [token for one in PROMPTS for token in one], GREEDY),  # its end comes before the head has read any
    ):
        with never_pays(**draft_costs) as llm:
            llm.generate([prompt], params)
            assert llm.engine._draft is not None and not unread(llm.engine._draft)


def test_a_conversation_keeps_the_heads_context_where_steps_overlapped():
    """The last token of an answer has run when it is known to end it; the head has its state, too."""
    answer = torch.load(models() / "answers.pt")[2]
    place = next(place for place in range(6, COUNT) if answer[place] not in answer[:place])
    with never_pays() as llm:
        (said,) = tokens(llm, [PROMPTS[2]], GREEDY.replace(stop_token_ids=[answer[place]]))
        text = [*PROMPTS[2], *said]
        tokens(llm, [[*text, 30]], GREEDY.replace(max_tokens=3))
        assert llm.engine.stats().reused_tokens == len(text), "all of it had run"
        assert [read.base for read in llm.engine._draft._read.values() if read.end > len(text)] == [0]


def test_an_error_in_what_is_noted_for_a_head_leaves_its_ranks_alone(monkeypatch, caplog):
    learn, failures = DraftHead.learn_hidden, [ValueError("too wide")]

    def learn_hidden(head, row, hidden):
        if row.start > 12 and failures:
            raise failures.pop()
        learn(head, row, hidden)

    monkeypatch.setattr(DraftHead, "learn_hidden", learn_hidden)
    with guessing("eagle", "learnt") as llm:
        assert tokens(llm, PROMPTS, GREEDY) == torch.load(models() / "answers.pt")
        assert not failures and "too wide" in caplog.text
        assert llm.engine.health().draft == {"ready": True, "restarts": 0} and llm.engine.stats().accepted_tokens > 0


def head_of(kind):
    """A learnt head in this process, its weights, and the features of a text."""
    text = [*PROMPTS[1], *torch.load(models() / "answers.pt")[1]]
    weights = torch.load(models() / f"learnt-{kind}.pt")
    target = load_artifact(traced("target", 1, hidden_states=kind)).manifest
    model = parallel_model_load(traced(f"learnt-{kind}", 1), in_process=True)
    return model, target, weights, text, eagle_heads.features(models() / "target", kind, text)


@pytest.mark.parametrize("kind", eagle_heads.KINDS)
def test_a_text_whose_beginning_it_lacks_begins_with_what_there_is(kind):
    """After the head's ranks were lost, or behind a prompt that the target has in its cache; then in the same slot."""
    model, target, weights, text, features = head_of(kind)
    with model:
        head = DraftHead(model, target, RankRestarts(0, 1.0))
        begin, known = 7, 16
        one = sequence(1, text[:known], 60, GREEDY, Sampler({"temperature": 0}, (), ()), output=[], slot=1)
        assert head.free(one) == 0, "nothing is there"
        head.learn_hidden(Row(one, begin, known - 1 - begin, False), features[begin:])
        expected = eagle_heads.chain(weights, text[begin + 1 : known], features[begin : known - 1], GUESSES)[1]
        assert head.free(one) == 96 - (known - begin) and head.behind(one) == known - 1 - begin
        head.read_on(one, 1e-9)
        assert head.behind(one) == 4, "it reads by its shortest piece"
        assert head.guess([(one, GUESSES)]) == [expected]
        assert head.free(one) == 0, "the last token has not run yet"
        # A choice with the same beginning, of which the target has 12 tokens; the head goes on behind them.
        other = sequence(2, [*text[:12], 77, 78, 79], 60, GREEDY, Sampler({"temperature": 0}, (), ()), slot=1)
        there = eagle_heads.features(models() / "target", kind, other.prompt)
        head.learn_hidden(Row(other, 12, 2, False), there[12:])
        assert head.behind(other) == 2, "it has read the others"
        # One of other weights of the target begins anew.
        third = sequence(3, other.prompt, 60, GREEDY, Sampler({"temperature": 0}, (), ()), slot=1)
        third.cache_key = "other weights"
        head.learn_hidden(Row(third, 0, 14, False), there)
        assert head.behind(third) == 14
        assert head.guess([(third, 2)]) == [eagle_heads.chain(weights, third.prompt[1:], there[:-1], 2)[1]]
        head.learn_hidden(Row(third, 14, 1, True), there[14:])
        head.lost(RuntimeError("its ranks"))
        assert not unread(head), "nobody will read them"


def test_few_states_kept_behind_an_end_do_not_keep_those_that_came_with_them():
    model, target, _, text, features = head_of("eagle")
    with model:
        head = DraftHead(model, target, RankRestarts(0, 1.0))
        one = sequence(1, text[:9], 60, GREEDY, Sampler({"temperature": 0}, (), ()), slot=1)
        head.learn_hidden(Row(one, 0, 8, False), features)
        head.read_on(one, 1e-9)
        one.ended = True
        head.drop_hidden(one)
        (kept,) = head._read[1].hidden
        assert unread(head) == 4 and kept.base is None


def test_drawn_guesses_have_the_targets_noise_wherever_the_text_begins():
    """A request draws with the noise of its seed at the token's place in the text, not in the head's cache."""
    from nxd_infer.ops import sample_adjusted

    model, target, weights, text, features = head_of("eagle")
    with model:
        head = DraftHead(model, target, RankRestarts(0, 1.0))
        for begin in (0, 5):
            for seed in range(4):
                values = {"temperature": 1.5, "seed": seed}
                one = sequence(10 * begin + seed, text[:12], 60, DRAWN, Sampler(values, (), ()), slot=0)
                head.learn_hidden(Row(one, begin, 11 - begin, False), features[begin:])
                (logits,), _ = eagle_heads.chain(weights, text[begin + 1 : 12], features[begin:11], 1)
                numbers = [torch.tensor([value]) for value in (1.5, 0, 1.0, 0.0, seed, 12)]
                drawn = int(sample_adjusted(logits[None], *numbers, 20)[0])
                assert head.guess([(one, 1)]) == [[drawn]]
                head._read.clear()


def test_what_does_not_go_together_is_refused_with_the_fix(tmp_path):
    head = traced("random-eagle3", 1)
    for target, words in (
        (traced("target", 1), r"graphs give none: trace the model again with --hidden-states eagle3"),
        (traced("target", 1, hidden_states="eagle"), r"graphs give those of eagle: trace .* --hidden-states eagle3"),
    ):
        with pytest.raises(ModelConfigError, match=f"draft: it is an eagle3 head, .*{words}"):
            LLM(target, draft=head)
    with pytest.raises(ModelConfigError, match="is of a head, which only guesses for another model"):
        LLM(head)
    manifests = [load_artifact(path).manifest for path in (traced("target", 1, hidden_states="eagle3"), head)]
    manifests[0].metadata["hidden_states"]["features"] = 192
    with pytest.raises(
        ModelConfigError, match=r"another model, with 96 numbers .* gives 192: trace it again.*--head-of"
    ):
        check_draft(*manifests)
    manifests[0].metadata["hidden_states"]["features"] = 96
    del manifests[0].files["config.json"]
    with pytest.raises(ModelConfigError, match=r"another model, with another config.json: trace it again.*--head-of"):
        check_draft(*manifests)
