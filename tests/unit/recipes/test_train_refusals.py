"""What a recipe cannot train is refused before the first step."""

from __future__ import annotations

import json

import pytest
import torch

from nxd_infer.context import make_context, use_context
from nxd_infer.errors import RecipeError
from nxd_infer.recipes.batches import Batches
from nxd_infer.recipes.job import Begin, make_job
from nxd_infer.recipes.loop import train
from nxd_infer.recipes.plan import plan_of
from nxd_infer.recipes.recipe import load
from tests.support.recipes.jobs import write, write_pairs
from tests.support.tiny_models import write_tiny


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gemma2", r"no causal language model for model_type 'gemma2': train it with nxd_infer\.distributed"),
        ("t5", "no causal language model for model_type 't5'"),
        ("mamba", "model_type = 'mamba': this architecture is not defined here"),
    ],
)
def test_a_model_that_recipes_do_not_train_is_refused(tmp_path, kind, told):
    """A model of transformers can be traced, but its module takes no labels."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": kind}))
    write_pairs(tmp_path)
    with pytest.raises(RecipeError, match=rf"\.yaml:7: model\.model_config: .*{told}"):
        train(load(write(tmp_path)))


def test_sequences_that_no_layer_would_split_are_refused(tmp_path):
    raw = {"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_attention_heads": 2, "vocab_size": 64}))
    file = write(tmp_path, 2, "distributed_strategy: {tensor_model_parallel_size: 2, sequence_parallel: true}\n")
    told = r"\.yaml:10: distributed_strategy\.sequence_parallel = True, but no layer of this model splits sequences"
    with pytest.raises(RecipeError, match=told), use_context(make_context(2, tp=2)):
        make_job(load(file), tmp_path, Begin(), 1)
    with use_context(make_context(2, tp=2)):
        make_job(load(file, ["distributed_strategy.sequence_parallel=false"]), tmp_path, Begin(), 1)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ("q_proj, embed_tokens", "be merged into it: leave it out of target_modules$"),  # the model that a job leaves
        ("nothing", r"\bq_proj\b"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_before_the_first_step(tmp_path, targets, told):
    write_tiny("llama", tmp_path / "model", tie_word_embeddings=True)
    more = f"model_alignment_strategy:\n  peft:\n    lora_rank: 4\n    target_modules: [{targets}]\n"
    loaded = load(write(tmp_path, 1, more))
    told = rf"\.yaml:13: model_alignment_strategy\.peft\.target_modules does not fit the model: .*{told}"
    for refused in (lambda: plan_of(loaded), lambda: make_job(loaded, tmp_path / "model", Begin(), 1)):
        with pytest.raises(RecipeError, match=told), use_context(make_context()):
            refused()


@pytest.mark.parametrize(("parts", "ranks"), [(2, 1), (1, 2)])
def test_a_model_whose_losses_do_not_add_up_is_refused(parts, ranks):
    def forward(input_ids, labels): ...

    batch = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "labels": torch.ones(2, 8, dtype=torch.int64)}
    with pytest.raises(RecipeError, match="takes no num_items_in_batch"):
        Batches(forward, make_context(ranks), parts, pairs=False, whole=False).prepared(batch, torch.device("cpu"))
    (call,) = Batches(forward, make_context(), 1, pairs=False, whole=False).prepared(batch, torch.device("cpu"))
    assert set(call) == {"input_ids", "labels"}
