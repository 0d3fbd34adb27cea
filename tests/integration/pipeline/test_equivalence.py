"""Training over pipeline stages is training in one process: losses, every gradient, norms, weights after some steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer import parallel_state
from nxd_infer.testing.compare import Reference, Training, compare_with, train_single
from tests.support.pipeline.models import decoder, encoder, sentences, tokens
from tests.support.ranks import run_ranks
from tests.support.trainer.padded import HIDDEN, UnpaddedModel

F64 = torch.float64
STEPS = 10
"""Of one case over stages, and one that has tensor parallelism too; the others take three."""
Case = tuple[str, torch.dtype, dict[str, Any]]


def pipeline(microbatches: int, **more: Any) -> dict[str, Any]:
    return {"auto_partition": True, "num_microbatches": microbatches, **more}


INTERLEAVED = {"virtual_pipeline_size": 2}
BY_CLASS = {"transformer_layer_cls": "LlamaDecoderLayer"}
CUTS = ["encoder.block.1", "encoder.block.3", "decoder.block.1"]
# A key's bias has no gradient but rounding, which Adam would scale to a step of full size.
SGD = {"optimizer_class": torch.optim.SGD, "optimizer_options": {"lr": 0.1, "momentum": 0.9}}
CASES: dict[tuple[int, int, int], list[Case]] = {
    (1, 2, 1): [
        ("llama", torch.float32, {"steps": STEPS, "pipeline": pipeline(4)}),
        ("tied", F64, {"pipeline": pipeline(3, **INTERLEAVED), "activation_checkpoint": "full"}),
        ("qwen3", F64, {"pipeline": pipeline(1), "meta": True}),
        ("biases", F64, {"pipeline": pipeline(8, schedule="zero-bubble"), "activation_checkpoint": "full"}),
        ("tied", F64, {"pipeline": pipeline(2, schedule="gpipe"), "max_grad_norm": None}),
        ("bert", torch.float32, {**SGD, "pipeline": pipeline(6, **INTERLEAVED)}),
        (
            "hf llama",
            torch.float32,
            {**SGD, "pipeline": pipeline(3, schedule="zero-bubble", tracer_cls="hf", **BY_CLASS)},
        ),
        ("hf t5", torch.float32, {**SGD, "pipeline": {"num_microbatches": 3, "pipeline_cuts": CUTS, **INTERLEAVED}}),
    ],
    (1, 4, 1): [
        ("tied", F64, {"pipeline": pipeline(5)}),
        ("llama", F64, {"pipeline": pipeline(8, schedule="zero-bubble")}),
        ("bert", F64, {"pipeline": pipeline(7, schedule="gpipe")}),
    ],
    (2, 2, 1): [
        ("llama", F64, {"steps": STEPS, "pipeline": pipeline(4), "sequence_parallel": True}),
        ("tied", F64, {"pipeline": pipeline(3, **INTERLEAVED), "sequence_parallel": True, "meta": True}),
        ("odd_heads", F64, {"pipeline": pipeline(2), "sequence_parallel": True, "activation_checkpoint": "full"}),
        ("bert", F64, {"pipeline": pipeline(4, schedule="zero-bubble")}),
        ("padded", torch.float32, {**SGD, "pipeline": pipeline(4), "pad_model": True}),
    ],
    (1, 2, 2): [
        ("tied", F64, {"pipeline": pipeline(4, schedule="zero-bubble"), "zero1": True}),
        ("bert", F64, {"pipeline": pipeline(3)}),
        ("llama", torch.float32, {**SGD, "pipeline": pipeline(2, **INTERLEAVED), "zero1": True}),
    ],
    (2, 2, 2): [("tied", F64, {"pipeline": pipeline(4), "zero1": True, "sequence_parallel": True})],
}


def hugging_face(model: str, dtype: torch.dtype) -> nn.Module:
    """As transformers builds it."""
    import transformers as hf

    if model == "hf t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_heads": 2}
        config = hf.T5Config(vocab_size=61, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
        return hf.T5ForConditionalGeneration(config).to(dtype)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=61, **sizes, **heads, tie_word_embeddings=True)).to(dtype)


def builder(model: str, dtype: torch.dtype):
    if model == "padded":
        return UnpaddedModel
    if model.startswith("hf"):
        return partial(hugging_face, model, dtype)
    return partial(encoder, dtype) if model == "bert" else partial(decoder, model, dtype)


def rows(case: Case, dp: int) -> int:
    return case[2]["pipeline"]["num_microbatches"] * dp * 2


def batch_for(case: Case, dp: int) -> dict[str, Any]:
    if case[0] == "padded":
        x, y = torch.randn(2, rows(case, dp), 6, HIDDEN, generator=torch.Generator().manual_seed(2))
        return {"x": x, "y": y}
    if case[0].startswith("hf"):
        batch = tokens(rows(case, dp))
        mask = (torch.arange(6) < 6 - torch.arange(rows(case, dp))[:, None] % 3).long()
        return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    # Of one data-parallel rank: the mean over ranks is not weighted by their labels, as without a pipeline.
    return sentences(rows(case, dp)) if case[0] == "bert" else tokens(rows(case, dp), uneven=dp == 1)


def run(degrees: tuple[int, int, int]) -> list[str]:
    """On one rank: every case, in a context of its own; what differs."""
    tp, pp, dp = degrees
    found: list[str] = []
    kept: dict[Any, Reference] = {}
    for case in CASES[degrees]:
        model, dtype, options = case
        training = Training(tp=tp, pp=pp, dp=dp, **options)
        key = (model, dtype, training.steps, rows(case, dp), training.max_grad_norm)
        if key not in kept:
            kept[key] = train_single(builder(model, dtype), batch_for(case, dp), training)
        parallel_state.destroy_model_parallel()
        differences = compare_with(kept[key], builder(model, dtype), batch_for(case, dp), training)
        found += [f"{model} {dtype} {options}: {line}" for line in differences]
    return found


@pytest.mark.parametrize("degrees", CASES, ids=lambda degrees: "tp{}pp{}dp{}".format(*degrees))
def test_equals_one_process(degrees: tuple[int, int, int]):
    world = degrees[0] * degrees[1] * degrees[2]
    for rank, found in enumerate(run_ranks(run, world, degrees, comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:8])
