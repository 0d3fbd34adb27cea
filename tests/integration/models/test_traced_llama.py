"""Traced decoders against transformers' ``generate`` and against the eager step: families, degrees, prompt lengths."""

import functools

import pytest
import torch

from nxd_infer.errors import InputRangeError
from nxd_infer.trace import parallel_model_trace
from nxd_models.hf import weights as hf
from nxd_models.serving import tasks
from nxd_models.serving.decoder_step import step_inputs
from nxd_models.serving.eager_generation import generate_eager
from tests.support.models.helpers import ODD, assert_greedy, greedy_reference, prompts_of, traced_run, without_mixed
from tests.support.needs import needs_inductor
from tests.support.tiny_models import write_tiny

BUCKET, MAX_LEN, NEW = 8, 40, 6
LENGTHS = (1, BUCKET - 1, BUCKET, BUCKET + 1, MAX_LEN - NEW)
ONE = {"num_hidden_layers": 1}
FAMILIES = {"llama3": ODD, "mistral": ONE, "qwen2": ONE, "qwen3": ONE}
"""With the sizes of each; one family's heads, inner size and vocabulary do not divide over any degree, and it has two
layers: what lies between them is of no family, and each is exported for every graph of every rank."""
NO_END = {"bias_ids": 2, "bias_values": [[-1e9] + [0.0] * 299] * len(LENGTHS)}
DRAWN = {
    "temperature": [0.0, 0.8, 1.0, 1.2, 1.0],
    "top_k": [0, 20, 0, 0, 5],
    "top_p": [1.0, 1.0, 0.9, 0.95, 0.9],
    "min_p": [0.0, 0.0, 0.0, 0.05, 0.0],
    "seed": [1, 2, 3, -4, 2**40],
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.2,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda family: write_tiny(family, root / family, **FAMILIES[family]))


@functools.cache
def expected_tokens(path, prompt):
    """The same at every degree and backend."""
    return greedy_reference(path, list(prompt), NEW)


def trace(path, degree, backend):
    plan = tasks.plan(path, batch_sizes=[len(LENGTHS)], prompt_buckets=[BUCKET], max_len=MAX_LEN, dtype=torch.float32)
    plan = without_mixed(plan)
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    return parallel_model_trace(**plan.trace_arguments(), tp_degree=degree, backend=backend), step


def check(path, degree, backend):
    model, step = trace(path, degree, backend)
    prompts = prompts_of(LENGTHS, 280, seed=30)
    with model:
        run = traced_run(model, step)
        greedy = generate_eager(step, prompts, NEW, piece=BUCKET, run=run, **NO_END)
        drawn = generate_eager(step, prompts, NEW, piece=BUCKET, run=run, **DRAWN)
        inputs = step_inputs(step.config.vocab_size, len(LENGTHS), 1, step.slots)
        for name, value in (("tokens", step.config.vocab_size), ("start", MAX_LEN), ("block_table", step.slots + 1)):
            with pytest.raises(InputRangeError, match=f"'{name}' holds the value {value}"):
                model.run_bucket(f"decode_b{len(LENGTHS)}", {**inputs, name: torch.full_like(inputs[name], value)})
    for prompt, result in zip(prompts, greedy, strict=True):
        assert_greedy(result.tokens, *expected_tokens(path, tuple(prompt)))
    eager = generate_eager(step, prompts, NEW, piece=BUCKET, **DRAWN)
    for found, expected in zip(drawn, eager, strict=True):
        assert found.tokens == expected.tokens, "the same seed draws the same tokens at every degree and backend"
        assert max(abs(a - b) for a, b in zip(found.logprobs, expected.logprobs, strict=True)) < 1e-4
        assert [list(top) for top in found.top] == [list(top) for top in expected.top]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_traced_tokens_equal_generate(directory, family, degree):
    check(directory(family), degree, "eager")


@needs_inductor
@pytest.mark.parametrize(("family", "degree"), [("qwen3", 1), ("llama3", 2)])
def test_compiled_tokens_equal_generate(directory, family, degree):
    check(directory(family), degree, "inductor")
