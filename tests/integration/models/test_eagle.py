"""EAGLE heads against a naive reference, and what a target gives them against transformers, in float32."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from nxd_infer.errors import CheckpointError, ModelConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_models import registry
from nxd_models.eagle.family import load_head
from nxd_models.serving import tasks
from nxd_models.serving.decoder_step import step_inputs
from tests.support import eagle_heads
from tests.support.eagle_heads import KINDS, LAYERS, VOCAB_SIZE, random_head, write_head, write_target
from tests.support.models.helpers import prompts_of
from tests.support.ranks import run_ranks

TEXT = prompts_of([14], VOCAB_SIZE, seed=3)[0]
CHAIN = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("eagle") / "target")


@pytest.fixture(scope="module")
def heads(target):
    return {kind: write_head(target.parent / kind, target, random_head(target, kind, seed=5)) for kind in KINDS}


def run(step, slot, start, tokens, length, **more):
    """One step of one row; its outputs at the row's place."""
    inputs = step_inputs(VOCAB_SIZE, 2, length, step.slots)
    inputs["block_table"][1], inputs["start"][1], inputs["length"][1] = slot, start, len(tokens)
    inputs["tokens"][1, : len(tokens)] = torch.tensor(tokens)
    for name, value in more.items():
        inputs[name] = torch.zeros(2, *value.shape, dtype=value.dtype)
        inputs[name][1] = value
    with torch.no_grad():
        return {name: value[1] for name, value in step(**inputs).items()}


def guesses(head: str, target: str, features: torch.Tensor):
    """Tokens and the log-probabilities of the 20 best: of a chain behind pairs that are read in three pieces."""
    directory = load_head(head, target)
    step = directory.make("generate", torch.float32, step=True, slots=3, max_len=32)
    step = hf.load(step, registry.weights(directory, "generate")).eval()
    pairs = TEXT[1:]
    width = features.shape[-1]
    for at, count, length in ((0, 6, 8), (6, 1, 1), (7, 6, 8)):
        given = torch.full((length, width), 7.0)
        given[:count] = features[at : at + count]
        run(step, 0, at, [9] * count, length, hidden=given, ahead=torch.tensor(1))  # another slot
        found = run(step, 2, at, pairs[at : at + count], length, hidden=given, ahead=torch.tensor(1))
    made = [found]
    for place in range(1, CHAIN):
        nothing = torch.full((1, width), 9.0)
        made.append(run(step, 2, len(pairs) - 1 + place, [-1], 1, hidden=nothing, ahead=torch.tensor(1)))
    return [int(one["token"]) for one in made], torch.stack([one["top_logprobs"][0] for one in made])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_chain_of_guesses_equals_the_naive_reference(target, heads, kind, ranks):
    features = eagle_heads.features(target, kind, TEXT)
    logits, expected = eagle_heads.chain(random_head(target, kind, seed=5), TEXT[1:], features[:-1], CHAIN)
    best = torch.stack(logits).log_softmax(-1).topk(20).values
    arguments = (guesses, ranks, str(heads[kind]), str(target), features)
    for tokens, logprobs in run_ranks(*arguments) if ranks > 1 else [guesses(*arguments[2:])]:
        assert tokens == expected
        assert torch.allclose(logprobs, best, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_gives_the_hidden_states_of_transformers(target, kind):
    plan = tasks.plan(target, hidden_states=kind, batch_sizes=[2], prompt_buckets=[8], max_len=32, dtype=torch.float32)
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    pieces = [run(step, 1, at, TEXT[at : at + n], size) for at, n, size in ((0, 8, 8), (8, 1, 1), (9, 5, 8))]
    found = torch.cat([piece["hidden"][:n] for piece, n in zip(pieces, (8, 1, 5), strict=True)])
    assert torch.allclose(found, eagle_heads.features(target, kind, TEXT), rtol=1e-5, atol=1e-5)
    assert plan.metadata["hidden_states"] == {"kind": kind, "features": found.shape[-1]}


def test_what_is_no_head_of_this_model_is_refused_with_the_fix(target, heads, tmp_path):
    other = write_target(tmp_path / "wide", hidden_size=48)
    for kind, numbers in (("eagle", "32, and .* has 48"), ("eagle3", "96, and .* has 144")):
        with pytest.raises(ModelConfigError, match=f"hidden states of {numbers}.*--head-of"):
            tasks.plan(heads[kind], head_of=other)
        with pytest.raises(ModelConfigError, match=r"is an EAGLE head: name the model .* with --head-of"):
            tasks.plan(heads[kind])
    words = write_target(tmp_path / "words", vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(ModelConfigError, match=f"vocabulary of {VOCAB_SIZE}, and .* has {VOCAB_SIZE + 1}"):
        tasks.plan(heads["eagle"], head_of=words)
    with pytest.raises(ModelConfigError, match="is no EAGLE head, it has no weight fc"):
        tasks.plan(target, head_of=target)
    with pytest.raises(ModelConfigError, match=r"lora_slots = 2: a head .* has none"):
        tasks.plan(heads["eagle"], head_of=target, lora_slots=2)
    with pytest.raises(ModelConfigError, match="norm_before_residual = True: heads of this form are not supported"):
        changed = write_head(tmp_path / "form", target, random_head(target, "eagle3"), norm_before_residual=True)
        tasks.plan(changed, head_of=target)
    weights = random_head(target, "eagle3")
    weights["d2t"][3] = VOCAB_SIZE
    plan = tasks.plan(write_head(tmp_path / "damaged", target, weights), head_of=target)
    with pytest.raises(CheckpointError, match=f"d2t does not map guesses to different tokens below {VOCAB_SIZE}"):
        plan.checkpoint_loader_callable()
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((heads["eagle3"] / "config.json").read_text())
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights are never loaded.*save_file"):
        tasks.plan(pickled, head_of=target)


def test_a_head_may_say_that_its_output_layer_is_tied(target, tmp_path):
    """As a copy of its model's config.json does; its weights are its own, or the model's."""
    for kind in KINDS:
        weights = random_head(target, kind)
        folder = write_head(tmp_path / kind, target, weights, tie_word_embeddings=True)
        for own in ({}, weights):
            if own:
                save_file({name: one.contiguous() for name, one in own.items()}, folder / "model.safetensors")
            found = tasks.plan(folder, head_of=target).checkpoint_loader_callable()
            for name in ("embed_tokens.weight", "lm_head.weight"):
                assert torch.equal(found.read(name), weights[name])


def test_a_damaged_head_is_refused_by_the_name_of_its_tensor(target, tmp_path):
    for name, damaged, words in (
        ("d2t", torch.zeros(0, dtype=torch.int64), "d2t does not map"),
        ("d2t", torch.zeros(2, 3, dtype=torch.int64), "d2t does not map"),
        ("fc.weight", torch.zeros(96), "fc.weight has 1 dimensions, expected 2"),
    ):
        weights = random_head(target, "eagle3")
        size = len(weights["d2t"])
        folder = write_head(tmp_path, target, weights | {name: damaged}, draft_vocab_size=size)
        with pytest.raises(CheckpointError, match=words):
            tasks.plan(folder, head_of=target).checkpoint_loader_callable()
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in random_head(target, "eagle3").items()}
    with pytest.raises(ModelConfigError, match="EAGLE-3 head without midlayer: heads of this form are not supported"):
        tasks.plan(write_head(tmp_path, target, renamed), head_of=target)


def test_models_that_give_no_hidden_states_are_refused(target, tmp_path):
    small = write_target(tmp_path / "small")
    (small / "config.json").write_text((small / "config.json").read_text().replace(f": {LAYERS},", ": 2,", 1))
    with pytest.raises(ModelConfigError, match=r"hidden_states = 'eagle3': .* has 2 layers, of which it reads three"):
        tasks.plan(small, hidden_states="eagle3")
    with pytest.raises(ModelConfigError, match="hidden_states = 'eagle': models of the Llama family"):
        tasks.plan(target, hidden_states="eagle", model_impl="transformers")
