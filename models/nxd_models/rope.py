"""Rotary position embedding and its scalings, as in the Hugging Face documentation ("RoPE scaling").

Both spellings in configuration files are read: ``rope_theta`` + ``rope_scaling`` (transformers 4) and
``rope_parameters`` (transformers 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.rope_scaling import ROPE_TYPES, RopeConfig, inverse_frequencies
from nxd_infer.parallel_layers.base import real_cpu_tensors
from nxd_models.hf.config_file import ConfigFile, Count, Positive


class _Scaling(ConfigFile):
    """``rope_scaling`` or ``rope_parameters``."""

    rope_theta: Positive | None = None
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Count | None = None


class RopeFile(ConfigFile):
    """The fields of ``config.json`` for rotary positions."""

    rope_theta: Positive = 10000.0
    rope_scaling: Any = None
    rope_parameters: Any = None
    partial_rotary_factor: Any = None
    original_max_position_embeddings: Count | None = None

    def rope(self, max_position: int) -> RopeConfig:
        """Raises ModelConfigError for an unknown scaling. ``max_position`` is the model's context length."""
        if self.rope_scaling and self.rope_parameters and self.rope_scaling != self.rope_parameters:
            raise self.error("rope_scaling", "rope_parameters says something else: keep the one that is meant")
        name = "rope_parameters" if self.rope_parameters else "rope_scaling"
        raw = self.rope_parameters or self.rope_scaling or {}
        if not isinstance(raw, Mapping):
            raise self.error(name, "expected an object")
        kind = raw.get("rope_type", raw.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise self.error(name, f"the RoPE type {kind!r} is not supported; known are {', '.join(ROPE_TYPES)}")
        partial = raw.get("partial_rotary_factor", self.partial_rotary_factor)
        if partial not in (None, 1, 1.0):
            raise ModelConfigError(f"{self._origin}: partial_rotary_factor = {partial!r}: only 1.0 is supported")
        scaling = _Scaling.read(raw, f"{self._origin}: {name}")
        theta = scaling.rope_theta or self.rope_theta
        if kind == "default":
            return RopeConfig(theta=theta)
        if "factor" not in raw:
            raise self.error(name, f"the RoPE type {kind!r} needs a factor")
        if kind == "linear":
            return RopeConfig("linear", theta, scaling.factor)
        if kind == "dynamic":
            return RopeConfig("dynamic", theta, scaling.factor, original_max_position=max_position)
        before = self.original_max_position_embeddings or scaling.original_max_position_embeddings
        original = before or max_position
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return RopeConfig("llama3", theta, scaling.factor, low, high, original)


class Rotary(nn.Module):
    """Rotary position embedding. The frequencies are a float32 buffer that is not in state dicts.

    They stay in float32 whatever the module is converted to, because bfloat16 frequencies lose the position after a
    few hundred tokens.
    """

    inv_freq: Tensor
    exponents: Tensor

    def __init__(self, head_dim: int, config: RopeConfig):
        super().__init__()
        self.head_dim = head_dim
        self.config = config
        self._restore(None)

    def _restore(self, device: torch.device | None) -> None:
        with real_cpu_tensors():
            inv_freq = inverse_frequencies(self.head_dim, self.config)
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)
        if self.config.type == "dynamic":
            self.register_buffer("exponents", exponents.to(device), persistent=False)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # Conversions of dtype and to_empty() must not change the frequencies; a move to another device must move them.
        self._restore(None if self.inv_freq.is_meta else self.inv_freq.device)
        return self

    def forward(self, positions_BS: Tensor, dtype: torch.dtype, total_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, S, 1, head_dim / 2] of ``dtype``.

        ``total`` is the length of each row's context after this step; only dynamic scaling reads it.
        """
        inv_freq = self.inv_freq
        if self.config.type == "dynamic" and total_B is not None:
            inv_freq = self._dynamic(total_B)[:, None]
        angle_BSF = positions_BS[..., None].float() * inv_freq
        return angle_BSF.cos().to(dtype).unsqueeze(2), angle_BSF.sin().to(dtype).unsqueeze(2)

    def _dynamic(self, total_B: Tensor) -> Tensor:
        """Return NTK-aware frequencies [B, head_dim / 2]: the base grows once the context exceeds the trained one."""
        c, d = self.config, self.head_dim
        length = total_B.clamp(min=c.original_max_position).float()
        growth = (c.factor * length / c.original_max_position - (c.factor - 1)).pow(d / (d - 2))
        return self.inv_freq * torch.exp(-self.exponents * growth.log()[:, None])


def share_rotary(model: nn.Module) -> None:
    """Let layers that rotate alike share their frequencies, so that a step makes its tables once."""
    first: dict[tuple[int, RopeConfig], Rotary] = {}
    for module in model.modules():
        if isinstance(module, Rotary):
            module.inv_freq = first.setdefault((module.head_dim, module.config), module).inv_freq


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + D/2])`` of each head, as paired in Hugging Face checkpoints."""
    first, second = x_BSHD.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
