"""Adapters over pipeline stages: trained, saved and loaded as in one process, PEFT's files whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.lora import LoRAModel
from tests.support.pipeline import jobs
from tests.support.pipeline.jobs import F64, train, train_alone
from tests.support.pipeline.models import decoder, tokens
from tests.support.ranks import run_ranks

STEPS, HALF = 4, 2
LORA = {"enable_lora": True, "lora_rank": 2, "target_modules": ["q_proj", "embed_tokens", "down_proj", "layers.3.mlp"]}
LAST: dict[str, Any] = {**LORA, "target_modules": ["layers.3."], "modules_to_save": ["norm"]}
HEAD: dict[str, Any] = {**LORA, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}


def untied() -> Any:
    return decoder("llama", F64)


def tied() -> Any:
    """A head with a name of its own, whose weight is the embedding's."""
    model: Any = untied()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def blank() -> Any:
    """The same module with another base."""
    model = untied()
    for param in model.parameters():
        param.data.fill_(0.01)
    return model


def job(pp: int, tp: int, lora: dict[str, Any], make: Any = untied, **options: Any) -> tuple[Any, Any]:
    return jobs.job(pp, tp, True, make, lora_config=lora, **options)


def alone(lora: dict[str, Any], make: Any = untied) -> tuple[list[float], set[str]]:
    """Losses in one process, and the names of the adapter's file."""
    model, _, losses = train_alone(lambda: LoRAModel(make(), lora), STEPS)
    return losses, set(model.state_dict())


def saved(folder: str) -> dict[str, list[float]]:
    """Half the steps at pp 2 and tp 2, the others after loading at other degrees; and PEFT's files."""
    found = {}
    model, optimizer = job(2, 2, LORA)
    first = train(model, optimizer, range(HALF))
    nxd.save_checkpoint(f"{folder}/ckpts", "half", model, optimizer)
    model.local_module().save_adapter(f"{folder}/adapter")
    model, optimizer = job(4, 1, LORA)
    nxd.load_checkpoint(f"{folder}/ckpts", "half", model, optimizer)
    found["resumed"] = first + train(model, optimizer, range(HALF, STEPS))
    started = {**LORA, "load_lora_from_ckpt": True, "lora_save_dir": f"{folder}/ckpts", "lora_load_tag": "half"}
    model, _ = job(2, 2, started)
    found["started from the adapter"] = [float(model.run_eval(**tokens(seed=HALF)))]
    model, _ = job(2, 2, {**started, "save_lora_base": True})
    nxd.save_checkpoint(f"{folder}/both", "half", model)
    model, _ = job(4, 1, {**started, "lora_save_dir": f"{folder}/both"}, blank)
    found["started from both"] = [float(model.run_eval(**tokens(seed=HALF)))]
    # Only the last stage has an adapter: the others have nothing to train.
    model, optimizer = job(2, 2, LAST, model_init_config={"meta_device_init": True})
    found["last"] = train(model, optimizer, range(STEPS))
    # The module to save is the embedding, too, which is another stage's.
    model, optimizer = job(2, 2, HEAD, tied)
    found["head"] = train(model, optimizer, range(STEPS))
    model.local_module().save_adapter(f"{folder}/head")
    # Merged, one weight would be two on different stages.
    for make, text in ((tied, "one weight, which pipeline stages share"), (partial(decoder, "tied", F64), "head is")):
        model, _ = job(2, 2, {**LORA, "save_lora_base": True, "merge_lora": True}, make)
        for merge in (model.local_module().merge, lambda one=model: nxd.save_checkpoint(f"{folder}/no", "a", one)):
            with pytest.raises(ParallelConfigError, match=text):
                merge()
    with pytest.raises(ParallelConfigError, match="'lm_head' has the weight of another module"):
        job(2, 2, {**LORA, "target_modules": ["lm_head"]}, tied)
    parallel_state.destroy_model_parallel()
    return found


def test_adapters_are_trained_saved_and_loaded(tmp_path: Path):
    losses, names = alone(LORA)
    ranks = run_ranks(saved, 4, str(tmp_path), comm_timeout=120)
    for found in ranks:
        assert found["resumed"] == pytest.approx(losses, rel=1e-9)
        assert found["started from the adapter"] == pytest.approx([losses[HALF]], rel=1e-9)
        assert found["started from both"] == pytest.approx([losses[HALF]], rel=1e-9), "with the base in its checkpoint"
        assert found["last"] == pytest.approx(alone(LAST)[0], rel=1e-9)
        assert found["head"] == pytest.approx(alone(HEAD, tied)[0], rel=1e-9)
    stored = load_file(tmp_path / "head/adapter_model.safetensors")
    assert {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"} < stored.keys()
    for folder in (tmp_path / "adapter", tmp_path / "ckpts/half/lora_adapter"):
        stored = load_file(folder / "adapter_model.safetensors")
        assert len(stored) == len(names) > 20
        assert any(".layers.3." in name for name in stored) and any(".layers.0." in name for name in stored)
