"""The families on real ranks at degrees 2 and 4: the same numbers as the plain model, the same tokens on every rank."""

import pytest
import torch

from nxd_models import registry
from nxd_models.hf import weights as hf
from nxd_models.llama.family import LlamaStep
from nxd_models.serving.eager_generation import generate_eager
from tests.support.models.helpers import prompts_of, relative_difference
from tests.support.ranks import run_ranks
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 50, "vocab_size": 287}

DECODER_CASES = {
    "llama": ("llama", {}),
    "llama3": ("llama3", {"vocab_size": 289}),
    "llama-odd": ("llama", ODD),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 3, "hidden_size": 36}),
    "mistral": ("mistral", {}),
    "qwen2-odd": ("qwen2", ODD),
    "qwen3-odd": ("qwen3", ODD),
}
ENCODER_CASES = {
    "bert-odd": ("bert", {"num_attention_heads": 3, "hidden_size": 36, "intermediate_size": 50, "vocab_size": 287}),
    "roberta": ("roberta", {}),
    "roberta_classifier": ("roberta_classifier", {}),
}


def decode(path: str, prompts: list[list[int]]):
    """Logits of one batch, and generated tokens and log probabilities: greedy, then seeded with penalties."""
    spec = registry.load_config(path)
    model = registry.load_model(path)
    ids = torch.tensor([prompt[:8] for prompt in prompts if len(prompt) >= 8])
    with torch.no_grad():
        logits = model(ids)
    step = hf.load(LlamaStep(spec.config, slots=2, max_len=40), registry.weights(path))
    greedy = generate_eager(step, prompts, 8, piece=7)
    drawn = generate_eager(
        step,
        prompts,
        8,
        temperature=[0.9, 1.2],
        top_p=0.95,
        seed=[11, -12],
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
    )
    return logits, [(r.tokens, r.logprobs) for r in greedy + drawn]


def decode_all(paths: dict[str, str], prompts: list[list[int]]):
    return {name: decode(path, prompts) for name, path in paths.items()}


def train_step(path: str, ids: torch.Tensor):
    """Loss and every gradient of this rank, with the layout to merge them by."""
    from nxd_infer.layout import weight_layout

    model = registry.load_model(path)
    loss, _ = model(ids, labels=ids)
    loss.backward()
    layouts = weight_layout(model)
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, layouts


def embed_all(paths: dict[str, str], ids: torch.Tensor, mask: torch.Tensor):
    with torch.no_grad():
        return {name: registry.load_model(path)(ids, mask) for name, path in paths.items()}


def directories(root, cases) -> dict[str, str]:
    return {name: str(write_tiny(family, root / name, **extra)) for name, (family, extra) in cases.items()}


@pytest.mark.parametrize("degree", [2, 4])
def test_decoders_on_ranks_equal_the_plain_model(tmp_path, degree):
    paths = directories(tmp_path, DECODER_CASES)
    prompts = prompts_of([17, 9], 280, seed=4)
    expected = decode_all(paths, prompts)
    ranks = run_ranks(decode_all, degree, paths, prompts)
    for name in DECODER_CASES:
        logits, generated = expected[name]
        for found_logits, found in (rank[name] for rank in ranks):
            assert relative_difference(found_logits, logits) < 1e-5, name
            assert found_logits.shape == logits.shape
            for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, generated, strict=True):
                assert tokens == expected_tokens, name
                assert max(abs(a - b) for a, b in zip(logprobs, expected_logprobs, strict=True)) < 1e-4, name


def test_a_tied_model_with_odd_sizes_on_two_ranks(tmp_path):
    paths = directories(tmp_path, {"qwen2": ("qwen2", ODD)})
    prompts = prompts_of([17, 9], 280, seed=4)
    logits, generated = decode_all(paths, prompts)["qwen2"]
    for rank in run_ranks(decode_all, 2, paths, prompts):
        assert relative_difference(rank["qwen2"][0], logits) < 1e-5
        assert [tokens for tokens, _ in rank["qwen2"][1]] == [tokens for tokens, _ in generated]


@pytest.mark.parametrize("degree", [2, 4])
def test_encoders_on_ranks_equal_the_plain_model(tmp_path, degree):
    paths = directories(tmp_path, ENCODER_CASES)
    ids = torch.tensor(prompts_of([12, 12], VOCAB_SIZE - 10, seed=5))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    expected = embed_all(paths, ids, mask)
    for rank in run_ranks(embed_all, degree, paths, ids, mask):
        for name, embedding in expected.items():
            assert relative_difference(rank[name], embedding) < 1e-5, name


@pytest.mark.parametrize("name", ["qwen3-odd", "llama3"])
def test_gradients_on_ranks_are_those_of_the_plain_model(tmp_path, name):
    from nxd_infer.layout.merge import merge_state_dicts

    path = directories(tmp_path, {name: DECODER_CASES[name]})[name]
    ids = torch.tensor(prompts_of([16, 16], 280, seed=6))
    loss, expected, _ = train_step(path, ids)
    results = run_ranks(train_step, 2, path, ids)
    assert all(abs(result[0] - loss) < 1e-5 * loss for result in results)
    merged = merge_state_dicts([result[1] for result in results], results[0][2])
    assert set(merged) == set(expected)
    for key, gradient in expected.items():
        assert relative_difference(merged[key], gradient) < 2e-5, key
