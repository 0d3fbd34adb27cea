"""Quantised checkpoints, packed number by number as their formats are defined, with the values that they stand for.

Each format rounds a weight [outputs, inputs] and returns its tensors and its value, computed with the dtype and in the
order of the library that defines it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]
Store = Callable[[Tensor], Stored]
FP8 = torch.float8_e4m3fn
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns is at each place of a word, from the lowest bits."""


def write_quantized(
    source: Path, out: Path, quantization: dict, store: Store, files: int = 1, head: bool = False
) -> tuple[Path, dict[str, Tensor]]:
    """Write the model of ``source`` with its linear layers as ``store`` has them, in ``files`` with an index.

    Return a directory beside it with plain weights of equal values, for other readers, and those values.
    """
    values: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        routes = module.endswith((".gate", "embed_tokens", "norm"))
        if part == "weight" and weight.ndim == 2 and not routes and (head or "lm_head" not in module):
            parts, values[name] = store(weight)
            tensors |= {f"{module}.{one}": tensor.contiguous() for one, tensor in parts.items()}
        else:
            tensors[name] = values[name] = weight
    plain = out.with_name(f"{out.name}-plain")
    for folder in (out, plain):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(
        {name: value.contiguous() for name, value in values.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    if files == 1:
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        return plain, values
    where = {name: f"model-{number % files + 1:05}-of-{files:05}.safetensors" for number, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, out / file, {"format": "pt"})
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return plain, values


def packed(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack integers along the last dimension into int32; ``order``: see :data:`AWQ_ORDER`."""
    each = 32 // bits
    order = order or tuple(range(each))
    out = np.zeros((*values.shape[:-1], -(-values.shape[-1] // each)), np.uint32)
    for word in range(out.shape[-1]):
        for place, column in enumerate(order):
            if word * each + column < values.shape[-1]:
                out[..., word] |= values[..., word * each + column].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(out.view(np.int32).copy())


def rounded(weight: Tensor, bits: int, index: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return levels [outputs, inputs], zeros and scales [outputs, groups]; ``index``: the group of each input."""
    groups, most = int(index.max()) + 1, 2**bits - 1
    scales = torch.empty(len(weight), groups, dtype=dtype)
    zeros = torch.empty(len(weight), groups, dtype=torch.int64)
    levels = torch.empty(weight.shape, dtype=torch.int64)
    for group in range(groups):
        part = weight[:, index == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[:, group] = ((high - low) / most).to(dtype)
        scale = scales[:, group].float()
        zeros[:, group] = 2 ** (bits - 1) if symmetric else (-low / scale).round().clamp(0, most).long()
        own = (part / scale[:, None] + zeros[:, group, None]).round().clamp(0, most)
        levels[:, index == group] = own.long()
    return levels, zeros, scales


def groups_of(inputs: int, size: int, shuffled: bool = False) -> Tensor:
    index = torch.arange(inputs) // (inputs if size == -1 else size)
    return index[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))] if shuffled else index


def gptq(
    bits: int = 4,
    size: int = 32,
    act_order: bool = False,
    symmetric: bool = True,
    v2: bool = False,
    positive: bool = False,
) -> Store:
    """``positive``: every third output has no weight below 0, so that its zero is 0."""

    def store(weight: Tensor) -> Stored:
        index = groups_of(weight.shape[1], size, act_order)
        if positive:
            weight = torch.where(torch.arange(len(weight))[:, None] % 3 == 0, weight.abs(), weight)
        levels, zeros, scales = rounded(weight, bits, index, symmetric, torch.float16)
        written = packed(zeros.T.numpy(), bits)
        if not v2:  # one less, with a borrow where a zero is 0
            written = written - sum(1 << shift for shift in range(0, 32, bits))
        parts = {
            "qweight": packed(levels.numpy(), bits).T,
            "qzeros": written,
            "scales": scales.T,
            "g_idx": index.int(),
        }
        return parts, scales[:, index] * (levels - zeros[:, index]).int()

    return store


def awq(size: int = 32) -> Store:
    def store(weight: Tensor) -> Stored:
        index = groups_of(weight.shape[1], size)
        levels, zeros, scales = rounded(weight, 4, index, False, torch.float16)
        parts = {
            "qweight": packed(levels.T.numpy(), 4, AWQ_ORDER),
            "qzeros": packed(zeros.T.numpy(), 4, AWQ_ORDER),
            "scales": scales.T,
        }
        return parts, (levels - zeros[:, index]).int() * scales[:, index]

    return store


def fp8(block: tuple[int, int] | None = (128, 128), part: str = "weight_scale_inv") -> Store:
    def store(weight: Tensor) -> Stored:
        height, width = block or weight.shape
        rows, columns = (torch.arange(size) // step for size, step in zip(weight.shape, (height, width), strict=True))
        scales = torch.empty(int(rows.max()) + 1, int(columns.max()) + 1)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                scales[i, j] = weight[rows == i][:, columns == j].abs().max() / 448
        spread = scales[rows][:, columns]
        levels = (weight / spread).to(FP8)
        parts = {"weight": levels, part: scales if block else scales.view(()), "input_scale": torch.tensor(1.5)}
        return parts, levels.float() * spread

    return store


def compressed_config(bits: int, size: int | None = 32, symmetric: bool = True, form: str = "pack-quantized") -> dict:
    """``size``: of a group; None for a scale per output."""
    strategy = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    group = {"targets": ["Linear"], "weights": weights}
    names = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**names, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def compressed(bits: int = 4, size: int = 32, symmetric: bool = True, shuffled: bool = False) -> Store:
    """compressed-tensors, pack-quantized, in bfloat16; signed levels are stored with an offset."""

    def store(weight: Tensor) -> Stored:
        index = groups_of(weight.shape[1], size, shuffled)
        levels, zeros, scales = rounded(weight, bits, index, symmetric, torch.bfloat16)
        half = 2 ** (bits - 1)
        parts = {
            "weight_packed": packed(levels.numpy(), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
            **({} if symmetric else {"weight_zero_point": packed(zeros.T.numpy(), bits).T}),
            **({"weight_g_idx": index.int()} if shuffled else {}),
        }
        signed, zero = (levels - half).to(torch.bfloat16), (zeros - half).to(torch.bfloat16)
        return parts, (signed - zero[:, index]) * scales[:, index]

    return store
