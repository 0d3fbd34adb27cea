"""A recipe trains the same on any number of ranks, however they share the work."""

from __future__ import annotations

import json
import math

import pytest

from tests.support.ranks import run_ranks
from tests.support.recipes.jobs import alone, losses_on_a_rank, write, write_pairs
from tests.support.tiny_models import write_tiny

SFT = "model_alignment_strategy: {sft: {packing: true}}\n"
STEPS = 3


@pytest.fixture
def folder(tmp_path):
    write_tiny("llama", tmp_path / "model")
    write_pairs(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The folder, and the losses of one rank."""
    folder = tmp_path_factory.mktemp("sft")
    write_tiny("llama", folder / "model")
    write_pairs(folder, 60)
    return folder, alone(write(folder, 1, SFT))


@pytest.mark.parametrize(
    ("overrides", "degrees"),
    [
        ([], {"tp": 1}),
        (
            ["distributed_strategy.tensor_model_parallel_size=2", "distributed_strategy.sequence_parallel=true"],
            {"tp": 2},
        ),
    ],
    ids=["dp", "tp"],
)
def test_two_ranks_train_as_one(expected, overrides, degrees):
    """Data-parallel ranks and microbatches have other numbers of counted tokens: the loss is a mean over all."""
    folder, losses = expected
    found = run_ranks(losses_on_a_rank, 2, str(write(folder, 2, SFT)), overrides, STEPS, **degrees)
    assert found[0] == pytest.approx(losses, rel=2e-5)
    assert found[1] == found[0]


def test_experts_train_on_ranks_that_share_them_as_on_one(folder):
    """Without a config.json the recipe is of a Mixtral; with one its keys replace the file's."""
    sizes = "num_layers: 2, hidden_size: 32, num_attention_heads: 2, ffn_hidden_size: 48"
    moe = "moe: {num_experts: 4, top_k: 2, router_aux_loss_coef: 0.5}"
    more = f"model: {{{sizes}, vocab_size: 264, {moe}, optim: {{lr: 1e-3, sched: {{warmup_steps: 1}}}}}}\n" + SFT
    files = []
    for devices in (1, 2):
        files.append(write(folder, devices, ""))
        text = files[-1].read_text()
        files[-1].write_text(text[: text.index("model:\n")] + more + text[text.index("precision:") :])
    tokenizer = ["data.tokenizer={type: trained, vocab_size: 264}"]
    losses = alone(files[0], tokenizer)
    assert losses[0] > math.log(264) + 0.9, "the load balancing loss of two of four experts is at least two"
    shared = [*tokenizer, "distributed_strategy.expert_model_parallel_size=2"]
    found = run_ranks(losses_on_a_rank, 2, str(files[1]), shared, STEPS, tp=1, ep=2)
    assert found[0] == pytest.approx(losses, rel=2e-5)


def test_dpo_trains_as_on_one_rank(folder):
    """The reference is the model that the training begins with, whatever rank says which pair's probability."""
    rows = [{"prompt": f"{n}? ", "chosen": f"{n}" * (1 + n % 4), "rejected": f"{n + 1}"} for n in range(17)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = "model_alignment_strategy: {dpo: {kl_beta: 0.5}}\n"
    losses = alone(write(folder, 1, more))
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert abs(losses[6] - losses[0]) > 1e-3  # the first step's rate is 0
    (folder / "log/reference.safetensors").unlink()
    degree = ["distributed_strategy.tensor_model_parallel_size=2"]
    found = run_ranks(losses_on_a_rank, 2, str(write(folder, 2, more)), degree, STEPS, tp=2)
    assert found[0] == pytest.approx(losses, rel=2e-5)


def test_orpo_trains_over_a_pipeline(folder):
    rows = [{"prompt": f"{n}? ", "chosen": f"{n}" * 5, "rejected": f"{n + 1}"} for n in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = "model_alignment_strategy: {orpo: {beta: 0.5}}\n"
    losses = alone(write(folder, 1, more))
    pipelined = ["distributed_strategy.pipeline_model_parallel_size=2"]
    found = run_ranks(losses_on_a_rank, 2, str(write(folder, 2, more)), pipelined, STEPS, tp=1, pp=2)
    assert found[0] == pytest.approx(losses, rel=2e-5)
