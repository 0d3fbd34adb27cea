"""What a recipe leaves, read by the libraries that define it: transformers, PEFT and TensorBoard."""

from __future__ import annotations

import json

import peft
import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nxd_infer.context import make_context, use_context
from nxd_infer.recipes.loop import train
from nxd_infer.recipes.recipe import load
from tests.support.e2e.command import here
from tests.support.recipes.jobs import write, write_pairs
from tests.support.tiny_models import write_tiny

ADAPTER = "{lora_rank: 4, lora_dropout: 0.0, target_modules: [q_proj, up_proj]}"
IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """An adapter of a model whose configuration says bfloat16, trained in float32."""
    folder = tmp_path_factory.mktemp("tuned")
    write_tiny("llama", folder / "model", torch_dtype="bfloat16")
    write_pairs(folder)
    file = write(folder, 1, f"model_alignment_strategy: {{sft: {{}}, peft: {ADAPTER}}}\n")
    logs = ["exp_manager.create_tensorboard_logger=true", "exp_manager.create_checkpoint_callback=true"]
    with use_context(make_context()):
        return folder, train(load(file, [*logs, "model.optim.sched.warmup_steps=2"]))


def test_transformers_reads_the_merged_model_in_the_dtype_that_it_has(tuned):
    _, outcome = tuned
    assert transformers.AutoModelForCausalLM.from_pretrained(outcome.model).dtype == torch.float32


def test_peft_reads_the_adapter_of_a_checkpoint(tuned):
    folder, outcome = tuned
    (checkpoint,) = (path for path in outcome.checkpoints.iterdir() if path.is_dir())
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, checkpoint / "lora_adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(outcome.model)
    with torch.no_grad():
        torch.testing.assert_close(adapted(IDS).logits, merged(IDS).logits, rtol=1e-5, atol=1e-5)


def test_an_export_of_the_adapter_names_the_merged_model(tuned):
    folder, outcome = tuned
    done = here("ckpt", "export-hf", outcome.checkpoints, "--config", folder / "model", "--out", folder / "out")
    assert done.status != 0 and f"take the merged model in {outcome.model}" in " ".join(done.err.split())


def test_tensorboard_has_the_rate_of_each_step(tuned):
    """The linear schedule of transformers: its first step has none, and its warmup ends with the whole rate."""
    _, outcome = tuned
    logged = [one.value for one in EventAccumulator(str(outcome.log_dir)).Reload().Scalars("lr")]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    rates = transformers.get_linear_schedule_with_warmup(optimizer, 2, 4).lr_lambdas[0]
    assert logged == pytest.approx([1e-3 * rates(step) for step in range(4)])
    assert json.loads((outcome.model / "config.json").read_text())["dtype"] == "float32"
