"""The configuration of LoRA that the training API prints."""

from __future__ import annotations

from typing import Any

import neuronx_distributed


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
