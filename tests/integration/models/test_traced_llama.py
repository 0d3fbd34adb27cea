"""Traced decoders against transformers' ``generate`` and against the eager step, at prompts of all kinds of length."""

import pytest
import torch

from nxd_infer.errors import InputRangeError
from nxd_infer.trace import parallel_model_trace
from nxd_models.hf import weights as hf
from nxd_models.serving import tasks
from nxd_models.serving.decoder_step import step_inputs
from nxd_models.serving.eager_generation import generate_eager
from tests.support.models.helpers import (
    DRAWN,
    ODD,
    assert_greedy,
    assert_same_draws,
    greedy_reference,
    prompts_of,
    traced_run,
    without_mixed,
)
from tests.support.tiny_models import write_tiny

BUCKET, MAX_LEN, NEW = 8, 40, 6
LENGTHS = (1, BUCKET, BUCKET + 3, MAX_LEN - NEW)
FAMILIES = {"llama3": ODD, "qwen3": {"num_hidden_layers": 1}}
"""With the sizes of each; one family's heads, inner size and vocabulary do not divide over any degree, and it has two
layers: what lies between them is of no family, and each is exported for every graph of every rank."""
NO_END = {"bias_ids": 2, "bias_values": [[-1e9] + [0.0] * 299] * len(LENGTHS)}


@pytest.mark.parametrize(("family", "degree"), [("llama3", 2), ("qwen3", 1)])
def test_traced_tokens_equal_generate(tmp_path, family, degree):
    path = write_tiny(family, tmp_path, **FAMILIES[family])
    sizes = {"batch_sizes": [len(LENGTHS)], "prompt_buckets": [BUCKET], "max_len": MAX_LEN}
    plan = without_mixed(tasks.plan(path, dtype=torch.float32, **sizes))
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    prompts = prompts_of(LENGTHS, 280, seed=30)
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=degree, backend="eager") as model:
        run = traced_run(model, step)
        greedy = generate_eager(step, prompts, NEW, piece=BUCKET, run=run, **NO_END)
        drawn = generate_eager(step, prompts, NEW, piece=BUCKET, run=run, **DRAWN)
        inputs = step_inputs(step.config.vocab_size, len(LENGTHS), 1, step.slots)
        for name, value in (("tokens", step.config.vocab_size), ("start", MAX_LEN), ("block_table", step.slots + 1)):
            with pytest.raises(InputRangeError, match=f"'{name}' holds the value {value}"):
                model.run_bucket(f"decode_b{len(LENGTHS)}", {**inputs, name: torch.full_like(inputs[name], value)})
    for prompt, result in zip(prompts, greedy, strict=True):
        assert_greedy(result.tokens, *greedy_reference(path, prompt, NEW))
    assert_same_draws(drawn, generate_eager(step, prompts, NEW, piece=BUCKET, **DRAWN))
