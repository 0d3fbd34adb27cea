"""Scalings of rotary positions, as in the Hugging Face documentation ("RoPE scaling")."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """``type`` is one of :data:`ROPE_TYPES`; for the other fields see the documentation of Hugging Face."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    """``llama3``: the context of the pre-training. ``dynamic``: the length up to which nothing is scaled."""


def inverse_frequencies(head_dim: int, c: RopeConfig) -> Tensor:
    """Return the frequencies, float32 [head_dim / 2]."""
    inv_freq = 1.0 / (c.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if c.type == "linear":
        return inv_freq / c.factor
    if c.type != "llama3":
        return inv_freq
    # Llama 3.1: long wavelengths are scaled by the factor, short ones kept, those in between interpolated.
    longest = c.original_max_position / c.low_freq_factor
    shortest = c.original_max_position / c.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = (c.original_max_position / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    between = (1 - smooth) * inv_freq / c.factor + smooth * inv_freq
    stretched = torch.where(wavelength > longest, inv_freq / c.factor, inv_freq)
    return torch.where((wavelength <= longest) & (wavelength >= shortest), between, stretched)
