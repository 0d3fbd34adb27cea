"""Hugging Face's models as transformers builds them, on two and four ranks: loss, gradients and evaluation of one
process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.tracing import trace_around_units
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
ROUNDING = 1e-6
"""Of losses: these models compute theirs in float32, whatever their own type is."""
STEPS = 3
SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def models(ranks: int = 4) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Each model with what is particular to its pipeline; on two ranks, each with another schedule."""
    import transformers as hf

    def layers(path: str, two: dict[str, Any] | None = None) -> dict[str, Any]:
        more = (two or {}) if ranks == 2 else {}
        stages = ranks * more.get("virtual_pipeline_size", 1)
        return {"pipeline_cuts": [f"{path}.{4 * stage // stages - 1}" for stage in range(1, stages)], **more}

    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    t5 = hf.T5Config(
        vocab_size=61,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=4,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    kv = {"num_key_value_heads": 1}
    return {
        "llama": (hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **kv)), {"auto_partition": True}),
        "tied llama": (
            hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **kv, tie_word_embeddings=True)),
            {"auto_partition": True, "transformer_layer_cls": "LlamaDecoderLayer"},
        ),
        "qwen3": (
            hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, **kv, head_dim=8)),
            layers("model.layers", {"schedule": "zero-bubble"}),
        ),
        "gpt_neox": (
            hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES, hidden_dropout=0.0, attention_dropout=0.0)),
            layers("gpt_neox.layers", {"schedule": "gpipe"}),
        ),
        "bert": (
            hf.BertForMaskedLM(hf.BertConfig(**SIZES, **no_dropout)),
            layers("bert.encoder.layer", {"virtual_pipeline_size": 2}),
        ),
        "t5 in its encoder": (hf.T5ForConditionalGeneration(t5), layers("encoder.block")),
        "t5 in its decoder": (
            hf.T5ForConditionalGeneration(t5),
            layers("decoder.block", {"virtual_pipeline_size": 2}),
        ),
        "t5 in both": (
            hf.T5ForConditionalGeneration(t5),
            {"pipeline_cuts": ["encoder.block.1", "encoder.block.3", "decoder.block.1"][4 // ranks - 1 :: 4 // ranks]},
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
    for name, (whole, options) in models(current_context().pp.degree).items():
        model = nxd.pipeline.NxDPPModel(copy.deepcopy(whole), num_microbatches=3, **options)
        loss = whole.train()(**batch()).loss
        loss.backward()
        wanted = {n: p.grad for n, p in whole.named_parameters()}
        got = float(model.run_train(**batch()))
        if abs(got - float(loss.detach())) > ROUNDING:
            found.append(f"{name}: loss {got}, wanted {float(loss.detach())}")
        names = dict(model.local_named_parameters())
        if not names or not names.keys() <= wanted.keys():
            found.append(f"{name}: holds {sorted(names)}")
        scale = float(torch.stack([g.norm() for g in wanted.values()]).norm())
        for n, p in names.items():
            if not torch.allclose(p.grad, wanted[n], rtol=1e-9, atol=1e-11 * scale):
                found.append(f"{name}: gradient of {n} differs by {float((p.grad - wanted[n]).norm())}")
        with torch.no_grad():
            evaluated = float(whole.eval()(**batch()).loss)
        if abs(float(model.run_eval(**batch())) - evaluated) > ROUNDING:
            found.append(f"{name}: evaluates to {float(model.run_eval(**batch()))}, wanted {evaluated}")
        found += [f"{name}: {line}" for line in train(whole, model)]
        held = torch.tensor(float(sum(p.numel() for p in model.local_parameters())))
        total = comm.all_reduce(held, current_context(), "pp")
        if total != sum(p.numel() for p in whole.parameters()):
            found.append(f"{name}: the stages hold {total} elements in all")
    return found


def train(whole: nn.Module, model: Any) -> list[str]:
    """A few steps of AdamW in one process and over the stages; which losses differ."""
    ours = torch.optim.AdamW(model.local_parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(whole.train().parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        loss = whole(**batch()).loss
        loss.backward()
        got = float(model.run_train(**batch()))
        ours.step()
        theirs.step()
        if abs(got - float(loss.detach())) > 3 * ROUNDING:
            found.append(f"loss of step {step}: {got}, wanted {float(loss.detach())}")
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_models_in_stages(ranks: int):
    for rank, found in enumerate(run_ranks(compare, ranks, pp=ranks, comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:12])


def test_no_tracer_follows_them():
    """Their code around the layers takes any keywords; the error says what works."""
    for model, options in models().values():
        cuts = options.get("pipeline_cuts", ["model.layers.1"])
        given = PipelineOptions({"tracer_cls": "torch", "input_names": list(batch())})
        with pytest.raises(
            ParallelConfigError, match=r"cannot trace the code around the layers .*leave tracer_cls out"
        ):
            trace_around_units(model, cuts, given)
