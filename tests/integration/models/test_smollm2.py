"""A real model out of a GGUF file: SmolLM2-135M-Instruct has the numbers that transformers has."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nxd_infer.cli.demo import smollm2
from nxd_infer.cli.demo.corpus import split
from nxd_infer.hugging_face import weights as hf
from nxd_infer.hugging_face.gguf_file import model_directory
from nxd_models import registry
from nxd_models.serving.eager_generation import generate_eager
from tests.support.models.helpers import relative_difference
from tests.support.ranks import run_ranks

COUNTRIES = ("France", "Japan", "Egypt", "Peru", "Norway")
THINGS = (
    "capital",
    "language",
    "currency",
    "largest city",
    "population",
    "longest river",
    "flag",
    "area",
    "food",
    "king",
)
QUESTIONS = [f"What is the {thing} of {country}?" for country in COUNTRIES for thing in THINGS]
TOKENS = 10
"""Of an answer."""


@pytest.fixture(scope="module")
def gguf() -> Path:
    found = smollm2.installed()
    assert found is not None, f"make install brings {smollm2.PACKAGE}"
    return found


@pytest.fixture(scope="module")
def theirs(gguf):
    """transformers' own reading of the file, in float32."""
    import transformers

    transformers.logging.set_verbosity_error()
    unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    read = transformers.AutoModelForCausalLM.from_pretrained
    return read(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **unpacked).eval()


@pytest.fixture(scope="module")
def tokenizer(gguf):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_directory(gguf), padding_side="left")


@pytest.fixture(scope="module")
def text(tokenizer) -> torch.Tensor:
    """Tokens of Python's reference [4, 128]."""
    return tokenizer(split()[1][0], return_tensors="pt").input_ids[0, : 4 * 128].view(4, 128)


def perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return math.exp(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())


@torch.no_grad()
def numbers(path: str, ids: torch.Tensor) -> torch.Tensor:
    return registry.load_model(path, dtype=torch.float32)(ids)


def answers_of(path: str, prompts: list[list[int]]) -> list[list[int]]:
    """The likeliest answers, at the degree of this process."""
    directory = registry.load_config(path)
    made = directory.make("generate", torch.float32, step=True, slots=len(prompts), max_len=80)
    step = hf.load(made, registry.weights(path)).eval()
    ends = directory.config.eos_token_ids
    return [one.tokens for one in generate_eager(step, prompts, TOKENS, eos_token_ids=ends)]


@torch.no_grad()
def test_perplexity_logits_and_answers_equal_transformers(gguf, theirs, tokenizer, text):
    exact = perplexity(theirs(text).logits, text)
    for weight in theirs.parameters():
        weight.copy_(weight.bfloat16())  # as it is kept
    expected = theirs(text).logits
    found = registry.load_model(gguf, dtype=torch.float32)(text)
    assert relative_difference(found, expected) < 1e-4
    assert abs(perplexity(found, text) / exact - 1) < 1e-3
    for degree in (2, 3):  # 9 heads over 2 ranks are padded
        for logits in run_ranks(numbers, degree, str(gguf), text[:1, :64]):
            assert relative_difference(logits, expected[:1, :64]) < 1e-4

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    asked = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    answered = theirs.generate(**asked, max_new_tokens=TOKENS, do_sample=False)[:, -TOKENS:].tolist()
    prompts = [row[mask.bool()].tolist() for row, mask in zip(asked["input_ids"], asked["attention_mask"], strict=True)]
    for degree in (1, 2, 3):
        for answers in run_ranks(answers_of, degree, str(gguf), prompts):
            assert answers == [expected[: len(ours)] for ours, expected in zip(answers, answered, strict=True)]
            assert "Paris" in tokenizer.decode(answers[0])
