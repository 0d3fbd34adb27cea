"""What the families share: RMS norm, rotary positions, activations, initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.parallel_layers.base import real_cpu_tensors
from nxd_infer.parallel_layers.layer_norm import SequenceParallelWeights
from nxd_models.hf.config import RopeConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}


class RMSNorm(SequenceParallelWeights):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, the mean taken in at least float32.

    ``sequence_parallel``: the input is this rank's piece of the sequence.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, sequence_parallel: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps
        self.sequence_parallel_enabled = sequence_parallel
        self._mark()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """``weight`` replaces the module's own, for a caller that routes its gradient."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight if weight is None else weight) * wide.to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embedding. Frequencies are a float32 buffer that no state dict holds.

    They are kept in float32 whatever the module is converted to, because bfloat16 frequencies lose the position after a
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
        # Conversions of dtype and to_empty() must not reach the frequencies; a move to a device must.
        self._restore(None if self.inv_freq.is_meta else self.inv_freq.device)
        return self

    def forward(self, positions_BS: Tensor, dtype: torch.dtype, total_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, each [B, S, 1, head_dim / 2] of ``dtype``.

        ``total`` is the length of each row's context after this step; only dynamic scaling reads it.
        """
        inv_freq = self.inv_freq
        if self.config.type == "dynamic" and total_B is not None:
            inv_freq = self._dynamic(total_B)[:, None]
        angle_BSF = positions_BS[..., None].float() * inv_freq
        return angle_BSF.cos().to(dtype).unsqueeze(2), angle_BSF.sin().to(dtype).unsqueeze(2)

    def _dynamic(self, total_B: Tensor) -> Tensor:
        """NTK-aware frequencies [B, head_dim / 2]: the base grows once the context exceeds the trained one."""
        c, d = self.config, self.head_dim
        length = total_B.clamp(min=c.original_max_position).float()
        growth = (c.factor * length / c.original_max_position - (c.factor - 1)).pow(d / (d - 2))
        return self.inv_freq * torch.exp(-self.exponents * growth.log()[:, None])


def inverse_frequencies(head_dim: int, c: RopeConfig) -> Tensor:
    """float32 [head_dim / 2]. The types are those of the Hugging Face documentation ("RoPE scaling")."""
    inv_freq = 1.0 / (c.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if c.type == "linear":
        return inv_freq / c.factor
    if c.type != "llama3":
        return inv_freq
    # Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between interpolated.
    longest = c.original_max_position / c.low_freq_factor
    shortest = c.original_max_position / c.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = (c.original_max_position / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    between = (1 - smooth) * inv_freq / c.factor + smooth * inv_freq
    stretched = torch.where(wavelength > longest, inv_freq / c.factor, inv_freq)
    return torch.where((wavelength <= longest) & (wavelength >= shortest), between, stretched)


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + D/2])`` of each head, the pairing of Hugging Face checkpoints."""
    first, second = x_BSHD.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def normal_init(std: float) -> Callable[[Tensor], object]:
    return partial(nn.init.normal_, std=std)


def zero_biases(module: nn.Module) -> None:
    """Biases start at zero in these families; the layers' default is that of ``nn.Linear``."""
    for name, param in module.named_parameters():
        if name.endswith("bias") and not param.is_meta:
            nn.init.zeros_(param)
