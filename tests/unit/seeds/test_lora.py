"""LoRA's configuration and wrapper, as the documents print them."""

from __future__ import annotations

import torch

from nxd_infer import compat

compat.install()

import neuronx_distributed as nxd
from neuronx_distributed.modules.lora import LoraConfig, LoRAModel, LoraModel, get_lora_model


def printed_config() -> LoraConfig:
    return LoraConfig(
        enable_lora=True,
        lora_rank=16,
        lora_alpha=32,
        lora_dropout=0.05,
        bias="none",
        target_modules=["q_proj", "v_proj", "k_proj"],
    )


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
