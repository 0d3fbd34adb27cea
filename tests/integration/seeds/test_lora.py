"""Fine-tuning with LoRA, as the training API calls it: the configuration, the wrapper, saving and loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from nxd_infer import compat

compat.install()

import neuronx_distributed
import neuronx_distributed as nxd
from neuronx_distributed.modules.lora import LoraConfig, LoRAModel, LoraModel, get_lora_model

from tests.support.seeds.degrees import alone, at_degree
from tests.support.seeds.model import get_model, tokens


def printed_config(**more: Any) -> Any:
    lora_config = neuronx_distributed.modules.lora.LoraConfig(
        enable_lora=True,
        lora_rank=16,
        lora_alpha=32,
        lora_dropout=0.05,
        bias="none",
        target_modules=["q_proj", "v_proj", "k_proj"],
    )
    for name, value in more.items():
        setattr(lora_config, name, value)
    return lora_config


def train(tp: int) -> list[float]:
    """The model of the tests has one module for q, k and v; its name is the word to find. Losses of four steps."""
    lora_config = printed_config(target_modules=["qkv_proj"], lora_dropout=0.0)
    nxd_config = neuronx_distributed.neuronx_distributed_config(
        tensor_parallel_size=tp,
        lora_config=lora_config,
    )
    torch.manual_seed(0)
    model = neuronx_distributed.initialize_parallel_model(nxd_config, get_model)
    assert isinstance(model.local_module(), LoRAModel)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained and all("qkv_proj" in name and "lora" in name for name in trained)
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, AdamW, model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(float(model.run_train(tokens())))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_model_is_adapted_and_trains_as_in_one_process():
    expected = alone(train, 1)
    assert expected[-1] < expected[0]
    for losses in at_degree(2, train, 2):
        assert losses == pytest.approx(expected, rel=1e-4)


def test_the_printed_configuration_finds_the_printed_names():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(self, name, nxd.parallel_layers.ColumnParallelLinear(4, 4))

    model = LoRAModel(Attention(), printed_config())
    assert "LoraModel(" in str(model) and model.get_base_model() is model.module
    assert LoraModel is LoRAModel and isinstance(get_lora_model(Attention(), printed_config()), LoRAModel)
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {
        "q_proj",
        "k_proj",
        "v_proj",
    }


def test_every_flag():
    for more, scaling in (({}, 2.0), ({"use_rslora": True}, 8.0)):
        lora_config = LoraConfig(
            enable_lora=True,
            lora_rank=16,
            lora_alpha=32,
            lora_dropout=0.05,
            bias="lora_only",
            target_modules=["qkv_proj"],
            init_lora_weights="gaussian",
            **more,
        )
        assert lora_config.scaling == scaling
        LoRAModel(get_model(), lora_config)
    by_position = LoraConfig(True, 16, 32, 0.05, "none", ["q_proj", "v_proj", "k_proj"], False, "default")
    assert by_position == printed_config() and LoraConfig(True, 16) == LoraConfig(enable_lora=True, lora_rank=16)
    assert by_position.save_lora_base is False and by_position.merge_lora is False
    off = nxd.neuronx_distributed_config(lora_config=LoraConfig(enable_lora=False))
    assert not isinstance(nxd.initialize_parallel_model(off, get_model).local_module(), LoRAModel)


# --- saving and loading -------------------------------------------------------------------------------------

MODES = [
    {"save_lora_base": False, "merge_lora": False},
    {"save_lora_base": True, "merge_lora": False},
    {"save_lora_base": True, "merge_lora": True},
]
"""The adapter only; both; the adapter merged into the base model."""


def save_and_load(checkpoint_dir: str, tp: int, config_in_adapter: bool) -> None:
    for number, mode in enumerate(MODES):
        lora_config = neuronx_distributed.modules.lora.LoraConfig(
            enable_lora=True,
            lora_rank=2,
            lora_alpha=4,
            target_modules=["qkv_proj"],
            save_lora_config_adapter=config_in_adapter,
            **mode,
        )
        nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=tp, lora_config=lora_config)
        torch.manual_seed(0)
        model = nxd.initialize_parallel_model(nxd_config, get_model)
        for param in model.parameters():
            if param.requires_grad:
                torch.nn.init.constant_(param, 0.1)
        expected = float(model.run_eval(tokens()))
        tag = f"mode{number}"
        neuronx_distributed.trainer.save_checkpoint(checkpoint_dir, tag, model)

        lora_config = LoraConfig(
            enable_lora=True,
            load_lora_from_ckpt=True,
            lora_save_dir=checkpoint_dir,  # checkpoint path
            lora_load_tag=tag,  # sub-directory under checkpoint path
        )
        started = lora_config
        if mode["merge_lora"]:  # nothing of an adapter is left in it
            lora_config = None
        nxd_config = nxd.neuronx_distributed_config(
            tensor_parallel_size=tp,
            lora_config=lora_config,
        )
        torch.manual_seed(1 if mode["save_lora_base"] else 0)
        model = nxd.initialize_parallel_model(nxd_config, get_model)
        if mode["save_lora_base"]:
            nxd.load_checkpoint(checkpoint_dir, tag, model)
        assert float(model.run_eval(tokens())) == pytest.approx(expected, rel=1e-5), mode
        if not mode["merge_lora"]:
            restored = model.local_module().lora_config
            assert (restored.lora_rank, restored.lora_alpha) == (2, 4)
            assert {name: getattr(restored, name) for name in mode} == mode
            assert restored.save_lora_config_adapter == config_in_adapter
        nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=tp, lora_config=started)
        torch.manual_seed(0)
        model = nxd.initialize_parallel_model(nxd_config, get_model)
        nxd.load_checkpoint(checkpoint_dir, tag, model)  # merged weights are loaded beside their adapter
        assert float(model.run_eval(tokens())) == pytest.approx(expected, rel=1e-5), mode


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("config_in_adapter", [True, False])
def test_saving_and_loading(tp: int, config_in_adapter: bool, tmp_path: Path):
    """With ``save_lora_config_adapter=False`` the configuration is ``lora_adapter/adapter_config.json``."""
    at_degree(tp, save_and_load, str(tmp_path), tp, config_in_adapter)
    files = list((tmp_path / "mode0").rglob("lora_adapter/adapter_config.json"))
    assert len(files) == (0 if config_in_adapter else 1)
    for file in files:
        assert json.loads(file.read_text())["r"] == 2
