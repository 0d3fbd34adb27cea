"""The families on real ranks: the same numbers as the plain model, the same tokens on every rank."""

import pytest
import torch

from nxd_infer.hugging_face import weights as hf
from nxd_models import registry
from nxd_models.serving.eager_generation import generate_eager
from tests.support.distributed.models import Case
from tests.support.models.helpers import prompts_of, relative_difference
from tests.support.ranks import run_ranks
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 50, "vocab_size": 287}
ONE_KEY = {"num_key_value_heads": 1, "num_attention_heads": 3, "hidden_size": 36}
DECODERS = {
    "llama3": ("llama3", {"vocab_size": 289}),
    "llama-odd": ("llama", ODD),
    "llama-one-kv-head": ("llama", ONE_KEY),
    "qwen2-odd": ("qwen2", ODD),
    "qwen3-odd": ("qwen3", ODD),
    "mixtral-odd": ("mixtral", ODD),
    "qwen3_moe-odd": ("qwen3_moe", {**ODD, "moe_intermediate_size": 21}),
}
ENCODERS = {
    "bert-odd": ("bert", {"num_attention_heads": 3, "hidden_size": 36, "intermediate_size": 50, "vocab_size": 287}),
    "roberta_classifier": ("roberta_classifier", {}),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    cases = {**DECODERS, **ENCODERS}
    neox = Case("gpt_neox", 3, 3, {"vocab_size": VOCAB_SIZE, "initializer_range": 0.3, "rotary_pct": 0.5})
    neox.build().save_pretrained(root / "gpt_neox")
    written = {name: str(write_tiny(family, root / name, **extra)) for name, (family, extra) in cases.items()}
    return {**written, "gpt_neox": str(root / "gpt_neox")}


def decode(path: str):
    """Logits of one batch, and generated tokens and log probabilities: greedy, then seeded with penalties."""
    prompts = prompts_of([17, 9], 280, seed=4)
    logits = registry.load_model(path)(torch.tensor([prompt[:8] for prompt in prompts]))
    directory = registry.load_config(path)
    step = hf.load(directory.make("generate", torch.float32, step=True, slots=2, max_len=40), registry.weights(path))
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    greedy = generate_eager(step, prompts, 8, piece=7)
    drawn = generate_eager(step, prompts, 8, temperature=[0.9, 1.2], top_p=0.95, seed=[11, -12], **penalties)
    return logits, [(result.tokens, result.logprobs) for result in greedy + drawn]


def embed(path: str):
    ids = torch.tensor(prompts_of([12, 12], VOCAB_SIZE - 10, seed=5))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return registry.load_model(path)(ids, mask), []


@torch.no_grad()
def numbers(paths: dict[str, str]):
    return {name: (embed if name in ENCODERS else decode)(path) for name, path in paths.items()}


@pytest.mark.smoke
def test_models_on_four_ranks_equal_the_plain_ones(paths):
    expected = numbers(paths)
    for rank in run_ranks(numbers, 4, paths):
        for name, (outputs, generated) in expected.items():
            found_outputs, found = rank[name]
            assert relative_difference(found_outputs, outputs) < 1e-5, name
            assert found_outputs.shape == outputs.shape
            for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, generated, strict=True):
                assert tokens == expected_tokens, name
                assert max(abs(a - b) for a, b in zip(logprobs, expected_logprobs, strict=True)) < 1e-4, name
