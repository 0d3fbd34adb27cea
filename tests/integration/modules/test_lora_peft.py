"""PEFT reads the adapters that this package writes, from one process and from two ranks, and the other way around."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.layout import load_weights
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from tests.support.modules.golden.make import FOLDER, GoldenNet
from tests.support.modules.lora import IDS, Pair, adapted
from tests.support.parallel_layers.compare import error
from tests.support.ranks import run_ranks


def written(folder: str, biases: str, parallel: bool) -> Tensor:
    """Write a random adapter of the golden model, and return the adapted model's logits."""
    base, tp = load_file(FOLDER / "base.safetensors"), current_context().tp
    ids = base.pop("ids")
    base.pop("logits")
    model = GoldenNet(parallel)
    load_weights(model, base, rank=tp.rank, degree=tp.degree)
    options = {"target_modules": ["proj", "embed", "conv"], "modules_to_save": ["head"], "bias": biases}
    adapted = LoRAModel(model, LoraConfig(lora_rank=2, **options)).eval()
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if param.requires_grad:  # the same values on every rank: both factors are whole where they are equal
                generator = torch.Generator().manual_seed(len(name))
                param.copy_(torch.randn(param.shape, generator=generator))
        logits = adapted(ids)
    adapted.save_adapter(folder)
    with pytest.raises(CheckpointError, match=r"cannot be written|another rank"):  # on every rank
        adapted.save_adapter(f"{folder}/adapter_config.json/below")
    return logits


@pytest.mark.parametrize(("ranks", "biases"), [(1, "none"), (2, "all")])
def test_peft_computes_what_the_adapted_model_did(ranks: int, biases: str, tmp_path: Path) -> None:
    from peft import PeftModel  # whose import takes seconds, in every rank and in whoever only collects tests

    if ranks == 1:
        logits = written(str(tmp_path), biases, True)
    else:
        logits = run_ranks(written, 2, str(tmp_path), biases, True)[0]
    base = load_file(FOLDER / "base.safetensors")
    ids = base.pop("ids")
    base.pop("logits")
    model = GoldenNet(parallel=False)
    model.load_state_dict(base)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(model, str(tmp_path)).eval()(ids)
    assert float((theirs - logits).abs().max() / logits.abs().max()) < 1e-5


def test_a_tied_module_to_save_is_saved_under_both_names(tmp_path: Path):
    """As PEFT needs them, whose module to save is a copy that is not tied."""
    from peft import PeftModel

    model = adapted(Pair(), target_modules=["mid"], modules_to_save=["head"])
    base = copy.deepcopy(model.module)
    model.save_adapter(tmp_path / "adapter")
    started = LoRAModel(
        Pair(),
        LoraConfig(load_lora_from_ckpt=True, lora_save_dir=tmp_path / "adapter"),  # pyright: ignore
    )
    plain = Pair()
    plain.mid.load_state_dict(base.mid.base_layer.state_dict())
    started.module.mid.base_layer.load_state_dict(plain.mid.state_dict())
    expected = model(IDS).detach()
    assert torch.equal(started(IDS), expected)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()(IDS)
    assert error(theirs, expected) < 1e-5
    for word in ("head", "embed"):
        untied = LoRAModel(Pair(tied=False), LoraConfig(lora_rank=2, target_modules=["mid"], modules_to_save=[word]))
        untied.save_adapter(tmp_path / word)
        model = LoRAModel(Pair(), untied.lora_config)
        with pytest.raises(WeightMismatchError, match=r"'base_model.model.head.weight' is one weight with another"):
            model.load_adapter(tmp_path / word)


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
