"""Adapted models on ranks train what one process does, and either loads the other's adapter; PEFT's files are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import nxd_infer as nxd
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import load_weights
from nxd_infer.modules.lora import LoraConfig, LoRAModel, save_adapter
from tests.support.modules.golden.make import FOLDER, GoldenNet
from tests.support.modules.lora import ALL, Net, batch
from tests.support.parallel_layers.compare import error
from tests.support.ranks import run_ranks


def train(folder: str, bias: str) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """Five steps with the trainer and dropout: losses, logits of the result, and the adapter at the beginning."""
    degree = current_context().tp.degree
    options: dict[str, Any] = {"lora_rank": 3, "target_modules": ALL, "lora_dropout": 0.3, "modules_to_save": ["norm"]}
    config = nxd.neuronx_distributed_config(tensor_parallel_size=degree, lora_config={**options, "bias": bias})
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(config, Net)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=2e-2)
    save_adapter(model.local_module(), f"{folder}/begin")
    torch.manual_seed(5)
    losses = []
    for _ in range(5):
        losses.append(model.run_train(**batch()).item())
        optimizer.step()
        optimizer.zero_grad()
    model.local_module().save_adapter(f"{folder}/end")
    with pytest.raises(CheckpointError, match=r"cannot be written|another rank"):  # on every rank
        model.local_module().save_adapter(f"{folder}/end/adapter_config.json/below")
    with torch.no_grad():
        return losses, model.eval()(batch()["ids"]), load_file(f"{folder}/begin/adapter_model.safetensors")


def test_two_ranks_train_what_one_does_and_either_loads_it(tmp_path: Path):
    losses, logits, begin = train(str(tmp_path / "one"), "all")
    assert losses[-1] < losses[0]
    for theirs, others, begun in run_ranks(train, 2, str(tmp_path / "two"), "all"):
        assert theirs == pytest.approx(losses, rel=1e-5) and error(others, logits) < 1e-4
        assert begun.keys() == begin.keys() and all(torch.equal(begun[name], begin[name]) for name in begin)
    one, two = (load_file(tmp_path / name / "end/adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert max(error(two[name], one[name]) for name in one if one[name].abs().max() > 1e-3) < 1e-3
    assert error(load_and_run(str(tmp_path / "two/end")), logits) < 1e-4
    for ours in run_ranks(load_and_run, 2, str(tmp_path / "one/end")):
        assert error(ours, logits) < 1e-4


def load_and_run(folder: str) -> Tensor:
    """As the document loads an adapter: nothing but flags."""
    path = Path(folder)
    lora_config = LoraConfig(
        enable_lora=True,
        load_lora_from_ckpt=True,
        lora_save_dir=str(path.parent),  # checkpoint path
        lora_load_tag=path.name,  # sub-directory under checkpoint path
    )
    degree = current_context().tp.degree
    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=degree, lora_config=lora_config)
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(nxd_config, Net).eval()
    assert model.local_module().lora_config.lora_rank == 3
    with torch.no_grad():
        return model(batch()["ids"])


def read_what_peft_wrote(parallel: bool, folder: str) -> float:
    """How far our logits are from PEFT's, and the same adapter written again."""
    base, tp = load_file(FOLDER / "base.safetensors"), current_context().tp
    ids, logits = base.pop("ids"), base.pop("logits")
    model = GoldenNet(parallel)
    load_weights(model, base, rank=tp.rank, degree=tp.degree)
    adapted = LoRAModel(model, LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(FOLDER))).eval()
    adapted.save_adapter(folder)
    return error(adapted(ids).detach(), logits)


@pytest.mark.parametrize("how", ["plain", "parallel", "two ranks"])
def test_peft_files_are_read_and_written_alike(how: str, tmp_path: Path):
    if how == "two ranks":
        assert max(run_ranks(read_what_peft_wrote, 2, True, str(tmp_path))) < 1e-5
    else:
        assert read_what_peft_wrote(how == "parallel", str(tmp_path)) < 1e-5
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, FOLDER))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = (json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path, FOLDER))
    for config in (ours, theirs):
        config["target_modules"] = sorted(config["target_modules"])
    theirs |= {"auto_mapping": None}  # which class of which file PEFT was given
    assert {name: theirs[name] for name in ours} == ours
