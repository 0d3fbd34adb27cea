"""The calls of the documents' chapter "Pipeline parallelism", on two stages."""

from __future__ import annotations

import pytest
import torch

from nxd_infer import compat

compat.install()

from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.pipeline import NxDPPModel

from tests.support.ranks import run_ranks
from tests.support.seeds.degrees import alone
from tests.support.seeds.model import LlamaDecoderLayer, LlamaRMSNorm, get_model, tokens

STEPS = 3


def batch() -> dict[str, torch.Tensor]:
    ids = torch.cat([tokens(), tokens() + 1])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def chapter(auto: bool) -> tuple[list[float], list[str]]:
    """``NxDPPModel`` with every documented argument; losses, the last an evaluation's, and this rank's layers."""
    torch.manual_seed(0)
    model = NxDPPModel(
        get_model(),
        transformer_layer_cls=LlamaDecoderLayer,
        num_microbatches=4,
        output_loss_value_spec=(True, False),
        return_mb_loss=False,
        broadcast_and_average_loss=True,
        pipeline_cuts=None if auto else ["layers.0"],
        input_names=["input_ids", "attention_mask", "labels"],
        leaf_module_cls=[LlamaRMSNorm],
        autowrap_functions=(torch.relu,),
        autowrap_modules=(mappings,),
        tracer_cls="torch",
        param_init_fn=None,
        trace_file_path=None,
        use_zero1_optimizer=False,
        auto_partition=auto,
    )
    optimizer = torch.optim.SGD([p for _, p in model.local_named_parameters()], lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(model.run_train(**batch())))
        optimizer.step()
    modules = [name for name, module in model.local_named_modules() if isinstance(module, LlamaDecoderLayer)]
    return [*losses, float(model.run_eval(**batch()))], modules


def both_chapters() -> list[tuple[list[float], list[str]]]:
    return [chapter(auto) for auto in (True, False)]


def one_process() -> list[float]:
    torch.manual_seed(0)
    model = get_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS + 1):
        optimizer.zero_grad()
        loss = model(**batch())[0]
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def test_the_chapter():
    expected = alone(one_process)
    for rank, found in enumerate(run_ranks(both_chapters, 2, pp=2)):
        for losses, modules in found:
            assert losses == pytest.approx(expected, rel=1e-5)
            assert modules == [f"layers.{rank}"]
