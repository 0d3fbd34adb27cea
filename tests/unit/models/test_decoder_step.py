"""The step's own promises: slots, counts, penalties, one step ahead, padding rows, defaults; guesses are verified."""

import pytest
import torch

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_models import registry
from nxd_models.llama.family import LlamaStep
from nxd_models.serving import tasks
from nxd_models.serving.decoder_step import step_inputs
from nxd_models.serving.eager_generation import generate_eager
from tests.support.models.helpers import prompts_of
from tests.support.tiny_models import VOCAB_SIZE, write_tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny("llama", tmp_path_factory.mktemp("step") / "llama")


@pytest.fixture
def step(path):
    config = registry.load_config(path).config
    return hf.load(LlamaStep(config, slots=4, max_len=32), registry.weights(path)).eval()


def run(step, rows, length=None, **settings):
    """One step of ``(slot, start, tokens)`` rows; returns its outputs."""
    longest = length or max(len(tokens) for _, _, tokens in rows)
    inputs = step_inputs(VOCAB_SIZE, len(rows), longest, step.slots)
    for at, (slot, start, tokens) in enumerate(rows):
        inputs["block_table"][at] = slot
        inputs["start"][at] = start
        inputs["length"][at] = len(tokens)
        inputs["tokens"][at, : len(tokens)] = torch.tensor(tokens)
    for name, value in settings.items():
        inputs[name][:] = torch.as_tensor(value, dtype=inputs[name].dtype)
    with torch.no_grad():
        return step(**inputs)


def test_batch_mates_slots_and_padding_never_change_an_answer(step):
    prompts = prompts_of([7, 12, 3, 9], VOCAB_SIZE, seed=20)
    settings = {"temperature": 1.1, "top_p": 0.9, "frequency_penalty": 0.4}
    together = generate_eager(step, prompts, 8, seed=[1, 2, 3, 4], **settings)
    for row, prompt in enumerate(prompts):
        alone = generate_eager(step, [prompt], 8, seed=row + 1, **settings)[0]
        assert alone.tokens == together[row].tokens
    first = run(step, [(2, 0, prompts[0])])["token"][0, 0]
    padded = run(step, [(4, 0, []), (1, 0, prompts[0]), (4, 0, [0])], length=12)["token"][1, 0]
    assert first == padded == generate_eager(step, [prompts[0]], 1)[0].tokens[0]


def test_minus_one_stands_for_the_last_sampled_token(step):
    prompt = prompts_of([6], VOCAB_SIZE, seed=21)[0]
    expected = generate_eager(step, [prompt], 6, presence_penalty=0.7)[0].tokens
    made = [int(run(step, [(3, 0, prompt)], presence_penalty=0.7)["token"])]
    for at in range(5):
        made.append(int(run(step, [(3, len(prompt) + at, [-1])], presence_penalty=0.7)["token"]))
    assert made == expected


def test_rows_of_one_slot_are_as_if_fed_one_after_the_other(step):
    """A prompt as rows of one token, in any order, beside another sequence that goes on."""
    first, second = prompts_of([7, 9], VOCAB_SIZE, seed=22)
    settings = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.3}
    expected = {}
    for way in ("one by one", "together"):
        for state in (step.token_counts, step.prompt_seen, step.last_token):
            state.fill_(1)
        run(step, [(2, 0, first)], prompt_length=len(first), **settings)
        rows = [(0, at, [token]) for at, token in enumerate(second)] + [(2, len(first), [-1])]
        rows = rows[4:] + rows[:4]
        lengths = [len(first) if slot == 2 else len(second) for slot, _, _ in rows]
        if way == "together":
            found = run(step, rows, prompt_length=lengths, **settings)
        else:
            for row, length in sorted(zip(rows, lengths, strict=True)):
                found = run(step, [row], prompt_length=length, **settings)
                expected |= {row[:2]: {name: value[0] for name, value in found.items()}}
            expected["states"] = [state[:4].clone() for state in (step.token_counts, step.prompt_seen, step.last_token)]
    last = len(second) - 1
    for at, (slot, start, _) in enumerate(rows):
        if (slot, start) in ((0, last), (2, len(first))):  # the others sample in the middle of a prompt
            for name, value in expected[slot, start].items():
                torch.testing.assert_close(found[name][at], value)
    for state, value in zip((step.token_counts, step.prompt_seen, step.last_token), expected["states"], strict=True):
        assert torch.equal(state[[0, 2]], value[[0, 2]])


def test_counts_tell_prompt_and_output_apart(step):
    def counted(slot=1):
        return step.prompt_seen[slot].nonzero().flatten().tolist(), step.token_counts[
            slot
        ].to_sparse().values().tolist()

    run(step, [(1, 0, [9, 9, 10])])
    assert counted() == ([9, 10], [])
    for start, token in enumerate((20, 20, 9), 3):
        run(step, [(1, start, [token])])
    assert counted() == ([9, 10], [1, 2])
    assert not step.token_counts[0].any(), "other slots are untouched"
    run(step, [(1, 0, [30, 31])])
    assert counted() == ([30, 31], []), "a new sequence begins with nothing counted"
    # With the length of the prompt given, any cut gives the same counts: here a resumed sequence in one piece.
    run(step, [(1, 0, [5, 6, 7, 7, 8])], prompt_length=2)
    assert counted() == ([5, 6], [2, 1])
    run(step, [(1, 0, [5])], prompt_length=2)
    run(step, [(1, 1, [6])], prompt_length=2)
    assert counted() == ([5, 6], []), "a prompt fed one token at a time stays prompt"


def test_a_row_of_no_tokens_changes_nothing(step):
    run(step, [(0, 0, [5, 6, 7])])
    before = {name: step.get_buffer(name)[:4].clone() for name in step.nxd_states}
    run(step, [(0, 0, [])], length=4)
    for name, value in before.items():
        assert torch.equal(step.get_buffer(name)[:4], value), name


def test_penalties_act_on_what_was_said(step):
    prompt = prompts_of([5], VOCAB_SIZE, seed=22)[0]
    plain = generate_eager(step, [prompt], 20)[0].tokens
    never_twice = generate_eager(step, [prompt], 20, presence_penalty=1000.0)[0].tokens
    assert len(set(plain)) < 20, "this prompt repeats itself without a penalty"
    assert len(set(never_twice)) == 20
    new = generate_eager(step, [prompt], 20, repetition_penalty=1e6)[0].tokens
    assert not set(new) & set(prompt), "the repetition penalty counts the prompt, presence does not"


def test_ids_out_of_range_harm_no_batch_mate(step):
    prompt = prompts_of([5], VOCAB_SIZE, seed=23)[0]
    expected = generate_eager(step, [prompt], 1)[0].tokens[0]
    outputs = run(step, [(0, 0, [10**6] * 5), (1, 0, prompt)])
    assert outputs["token"][1, 0] == expected
    assert 0 <= outputs["token"][0, 0] < VOCAB_SIZE


def test_the_plan_of_a_decoder(path):
    options = {"batch_sizes": [4, 1], "prompt_buckets": [16, 512], "max_len": 64, "dtype": torch.float32}
    shapes = {"decode_b1": (1, 1), "decode_b4": (4, 1), "mixed_b20": (20, 1), "prefill_s16": (1, 16)}
    shapes["prefill_s64"] = (1, 64)
    for speculate, more in ((0, {}), (4, {"verify_b1": (1, 5), "verify_b4": (4, 5)})):
        plan = tasks.plan(path, speculate=speculate, **options)
        found = [tuple(inputs["tokens"].shape) for inputs in plan.example_inputs]
        assert dict(zip(plan.bucket_names, found, strict=True)) == {**shapes, **more}
    wanted = {"max_len": 64, "slots": 4, "prompt_buckets": [16, 64], "batch_sizes": [1, 4], "eos_token_ids": [2]}
    wanted["speculate"] = 4
    assert {name: plan.metadata[name] for name in wanted} == wanted
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer_check.json"} <= set(plan.files)
    (path.parent / "own.jinja").write_text("own")
    asked = str(path.parent / "own.jinja")
    assert tasks.plan(path, chat_template=asked, **options).files["chat_template.jinja"] == b"own"
    for options, message in (
        ({"max_len": 1000}, "max_position_embeddings = 256"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"batch_sizes": [4], "slots": 1}, "slots = 1"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            tasks.plan(path, **options)


def test_the_plan_of_an_encoder(tmp_path):
    plan = tasks.plan(write_tiny("roberta", tmp_path), batch_sizes=[1, 2], prompt_buckets=[16, 400])
    assert plan.bucket_names == ["b1_s16", "b1_s126", "b2_s16", "b2_s126"]
    assert (plan.task, plan.metadata["pooling"], plan.metadata["normalize"]) == ("embed", "mean", True)
    module = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    outputs = module(**plan.example_inputs[2])
    assert outputs["embedding"].shape == (2, 32)
    assert module.nxd_inputs["input_ids"]["pad"] == {0: 1, 1: 1}
    with pytest.raises(ModelConfigError, match="at most 126"):
        tasks.plan(tmp_path, max_len=127)


GUESSES = 4
DRAWN = {"temperature": 1.1, "top_p": 0.9, "seed": 9}


@pytest.fixture
def verifying(path):
    config = registry.load_config(path).config
    return hf.load(LlamaStep(config, slots=4, max_len=48, draft_tokens=GUESSES), registry.weights(path)).eval()


@pytest.mark.parametrize(
    ("settings", "right"), [({}, 0), ({}, 4), (DRAWN, 1), (DRAWN, 4), ({"bias_ids": 7, "bias_values": 2.5}, 2)]
)
def test_right_guesses_give_what_decode_gives_and_wrong_ones_leave_nothing(verifying, settings, right):
    step = verifying
    prompt, other = prompts_of([7, 11], VOCAB_SIZE, seed=40)
    plain = generate_eager(step, [prompt], 10, **settings)[0]
    expected = plain.tokens
    for slot, tokens in ((0, other), (1, prompt)):
        made = run(step, [(slot, 0, tokens)], prompt_length=len(tokens), **settings)["token"][0, 0]
    assert made == expected[0]
    guesses = [*expected[1 : 1 + right], *[(token + 1) % VOCAB_SIZE for token in expected[1 + right : 1 + GUESSES]]]
    # A mate with no guess, and one that is padding, share the step.
    rows = [(0, len(other), [5]), (4, 0, []), (1, len(prompt), [expected[0], *guesses])]
    outputs = run(step, rows, prompt_length=[len(other), 0, len(prompt)], **settings)
    assert outputs["token"].shape == (3, GUESSES + 1) and outputs["top_logprobs"].shape == (3, GUESSES + 1, 20)
    assert outputs["token"][2, : right + 1].tolist() == expected[1 : right + 2]
    logprobs = outputs["logprob"][2, : right + 1].tolist()
    assert logprobs == pytest.approx(plain.logprobs[1 : right + 2], abs=1e-5)
    assert step.last_token[1] == expected[right + 1]
    # What was wrong is written over before it is read, whatever step comes next.
    at = right + 1
    for length in (1, GUESSES + 1, 1):
        row = (1, len(prompt) + at, [expected[at]])
        assert run(step, [row], length, prompt_length=len(prompt), **settings)["token"][0, 0] == expected[at + 1]
        at += 1


def test_a_row_without_guesses_keeps_its_penalties(verifying):
    """It shares its mates' step with a single token, counted and sampled as a decode step does."""
    prompt = prompts_of([6], VOCAB_SIZE, seed=41)[0]
    settings = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    expected = generate_eager(verifying, [prompt], 8, **settings)[0].tokens
    made, row, length = [], (2, 0, prompt), len(prompt)
    while len(made) < 8:
        made.append(int(run(verifying, [row], length, prompt_length=len(prompt), **settings)["token"][0, 0]))
        row, length = (2, len(prompt) + len(made) - 1, [made[-1]]), GUESSES + 1
    assert made == expected


def test_what_cannot_be_speculated_with_is_refused(path, tmp_path):
    for speculate in (-1, 16, True, 1.5):
        with pytest.raises(ModelConfigError, match="speculate must be a whole number from 0 to 15"):
            tasks.plan(path, speculate=speculate)
    with pytest.raises(ModelConfigError, match="a step of 16 tokens verifies guesses"):
        tasks.plan(path, prompt_buckets=[16], speculate=15)
    with pytest.raises(ModelConfigError, match="max_len = 8"):
        tasks.plan(path, prompt_buckets=[4], max_len=8, speculate=8)
    with pytest.raises(ModelConfigError, match="'embed' guesses no tokens"):
        tasks.plan(write_tiny("bert", tmp_path / "bert"), "embed", speculate=2)
    with pytest.raises(ModelConfigError, match="chat_template = 'x': the task 'embed' has no conversations"):
        tasks.plan(write_tiny("bert", tmp_path / "bert"), "embed", chat_template="x")
