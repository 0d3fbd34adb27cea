"""LoRA adapters in PEFT's format for tiny models, written plainly, and model directories with an adapter merged in."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path, model_dir: Path, *, rank: int, targets=ALL, seed: int = 0, alpha: float = 8.0, **config: Any
) -> Path:
    """Random factors for every layer of ``model_dir`` that ``targets`` names; ``config`` goes into the json file."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model_dir / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if name.endswith(".weight") and path.rpartition(".")[2] in targets:
            out, into = weight.shape
            tensors[f"{PREFIX}{path}.lora_A.weight"] = torch.randn(rank, into, generator=generator) * into**-0.5
            tensors[f"{PREFIX}{path}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.2
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    stored = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(targets), **config}
    (directory / "adapter_config.json").write_text(json.dumps(stored))
    return directory


def merge(model_dir: Path, adapter: Path, directory: Path) -> Path:
    """A copy of ``model_dir`` whose weights are W + scaling * B A, computed in float64."""
    shutil.copytree(model_dir, directory)
    weights, factors = load_file(model_dir / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    for name in [name for name in factors if name.endswith(".lora_A.weight")]:
        a, b = factors[name].double(), factors[name.replace(".lora_A.", ".lora_B.")].double()
        target = name.removeprefix(PREFIX).replace(".lora_A.weight", ".weight")
        weights[target] = (weights[target].double() + scaling * b @ a).float()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory
