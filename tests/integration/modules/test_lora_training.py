"""Adapters with sequence parallelism, activation checkpointing and ZeRO-1: the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_infer as nxd
from nxd_infer import trainer
from nxd_infer.context import current_context
from nxd_infer.modules.lora import LoraConfig
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import mine
from tests.support.trainer.models import llama, tokens


def train_llama(dp: int, options: dict[str, Any]) -> list[float]:
    """Five steps of a small Llama whose projections, embedding and head are adapted; losses over all rows."""
    place = current_context()
    lora_config = LoraConfig(lora_rank=2, target_modules=["proj", "embed", "lm_head"], lora_dropout=0.2)
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=place.tp.degree,
        sequence_parallel=options.get("sequence_parallel", False) and place.tp.degree > 1,
        activation_checkpoint_config=options.get("checkpoint"),
        optimizer_config={"zero_one_enabled": options.get("zero1", False)},
        lora_config=lora_config if dp == 1 else LoraConfig.of({**lora_config.to_dict(), "lora_dropout": 0.0}),
    )
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(config, llama)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-2)
    rows = mine(tokens())
    torch.manual_seed(1)
    losses = []
    for _ in range(5):
        losses.append(model.run_train(**rows).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("tp", "dp", "options"),
    [
        (2, 1, {"sequence_parallel": True, "checkpoint": "full"}),
        (2, 2, {"zero1": True, "sequence_parallel": True}),
    ],
)
def test_a_llama_trains_as_in_one_process(tp: int, dp: int, options: dict[str, Any]):
    alone = train_llama(dp, {})
    assert alone[-1] < alone[0]
    ranks = run_ranks(train_llama, tp * dp, dp, options, tp=tp)
    mean = [sum(losses) / len(losses) for losses in zip(*ranks, strict=True)]
    assert mean == pytest.approx(alone, rel=1e-5)


WAYS = {"adapter": {}, "both": {"save_lora_base": True}, "merged": {"save_lora_base": True, "merge_lora": True}}


def llama_with_lora(seed: int, **options: Any) -> Any:
    """An adapted Llama in evaluation mode."""
    lora_config = {"lora_rank": 2, "target_modules": ["proj", "lm_head"], **options}
    degree = current_context().tp.degree
    config = nxd.neuronx_distributed_config(tensor_parallel_size=degree, lora_config=lora_config)
    torch.manual_seed(seed)
    return nxd.initialize_parallel_model(config, llama).eval()


def save_llama(folder: str) -> float:
    """Checkpoints in the three ways of one adapted model, one of them in the background; its loss."""
    loss = 0.0
    for way, options in WAYS.items():
        model = llama_with_lora(0, **options)
        for _ in range(2):  # in the first step A has no gradient
            model.run_train(**tokens())
            with torch.no_grad():
                for param in model.parameters():
                    if param.grad is not None:
                        param -= param.grad
            model.zero_grad()
        trainer.save_checkpoint(folder, way, model, async_save=way == "both")
        loss = model.run_eval(**tokens()).item()
    return loss


def load_llama(folder: str) -> dict[str, float]:
    """The loss after loading each checkpoint, into a model of another seed where the base weights lie in it."""
    found = {}
    for way in WAYS:
        model = llama_with_lora(0 if way == "adapter" else 1)
        trainer.load_checkpoint(folder, way, model)
        found[way] = model.run_eval(**tokens()).item()
        flags = {"load_lora_from_ckpt": True, "lora_save_dir": folder, "lora_load_tag": way}
        found[f"{way} by flags"] = llama_with_lora(1 if way == "both" else 0, **flags).run_eval(**tokens()).item()
    newest = llama_with_lora(0, load_lora_from_ckpt=True, lora_save_dir=folder)
    found["the newest"] = newest.run_eval(**tokens()).item()
    degree = current_context().tp.degree
    torch.manual_seed(1)
    plain = nxd.initialize_parallel_model(nxd.neuronx_distributed_config(tensor_parallel_size=degree), llama)
    trainer.load_checkpoint(folder, "merged", plain)
    return found | {"without LoRA": plain.run_eval(**tokens()).item()}


def test_checkpoints_in_the_three_ways_are_read_at_other_degrees(tmp_path: Path):
    two = run_ranks(save_llama, 2, str(tmp_path / "two"))[0]
    one = save_llama(str(tmp_path / "one"))
    assert one == pytest.approx(two, rel=1e-5) and abs(one - llama_with_lora(0).run_eval(**tokens()).item()) > 1e-2
    for found in (load_llama(str(tmp_path / "two")), *run_ranks(load_llama, 2, str(tmp_path / "one"))):
        assert found == pytest.approx(dict.fromkeys(found, one), rel=1e-5)
