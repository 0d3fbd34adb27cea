"""Hugging Face's models as transformers builds them, on two ranks: loss, gradients and evaluation of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer import comm
from nxd_infer.context import current_context
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
ROUNDING = 1e-6
"""Of losses: these models compute theirs in float32, whatever their own type is."""
SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Each model with what is particular to its pipeline of two ranks."""
    import transformers as hf

    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_heads": 2}
    t5 = hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    kv = {"num_key_value_heads": 1}
    return {
        "tied llama": (
            hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **kv, tie_word_embeddings=True)),
            {"auto_partition": True, "transformer_layer_cls": "LlamaDecoderLayer", "schedule": "zero-bubble"},
        ),
        "t5 in both": (
            hf.T5ForConditionalGeneration(t5),
            {"pipeline_cuts": ["encoder.block.1", "encoder.block.3", "decoder.block.1"], "virtual_pipeline_size": 2},
        ),
    }


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 61, (6, 7), generator=torch.Generator().manual_seed(1))
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row in range(6):
        labels[row, : row % 4] = -100
        mask[row, 7 - row % 3 :] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def compare() -> list[str]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    found: list[str] = []
    for name, (whole, options) in models().items():
        model = nxd.pipeline.NxDPPModel(copy.deepcopy(whole), num_microbatches=3, **options)
        loss = whole.train()(**batch()).loss
        loss.backward()
        wanted = {n: p.grad for n, p in whole.named_parameters()}
        got = float(model.run_train(**batch()))
        if abs(got - float(loss.detach())) > ROUNDING:
            found.append(f"{name}: loss {got}, wanted {float(loss.detach())}")
        names = dict(model.local_named_parameters())
        scale = float(torch.stack([g.norm() for g in wanted.values()]).norm())
        for n, p in names.items():
            if not torch.allclose(p.grad, wanted[n], rtol=1e-9, atol=1e-11 * scale):
                found.append(f"{name}: gradient of {n} differs by {float((p.grad - wanted[n]).norm())}")
        with torch.no_grad():
            evaluated = float(whole.eval()(**batch()).loss)
        if abs(float(model.run_eval(**batch())) - evaluated) > ROUNDING:
            found.append(f"{name}: evaluates to {float(model.run_eval(**batch()))}, wanted {evaluated}")
        held = torch.tensor(float(sum(p.numel() for p in model.local_parameters())))
        total = comm.all_reduce(held, current_context(), "pp")
        if total != sum(p.numel() for p in whole.parameters()):
            found.append(f"{name}: the stages hold {total} elements in all")
    return found


def test_models_in_two_stages():
    for rank, found in enumerate(run_ranks(compare, 2, pp=2, comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:12])
