"""What a quantized weight is: its dtype, and how many of its values share a scale."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from nxd_infer.errors import ParallelConfigError


class QuantizationType(Enum):
    """Which values share a scale; zero is zero."""

    PER_TENSOR_SYMMETRIC = "per_tensor_symmetric"
    PER_CHANNEL_SYMMETRIC = "per_channel_symmetric"
    EXPERT_WISE_PER_CHANNEL_SYMMETRIC = "expert_wise_per_channel_symmetric"


class QuantizedDtype(Enum):
    INT8 = torch.int8
    F8E4M3 = torch.float8_e4m3fn
    F8E5M2 = torch.float8_e5m2


class ActivationQuantizationType(Enum):
    NONE = None


FIELDS = ("quantization_type", "quantized_dtype", "quantization_per_channel_axis")
BASE_QCONFIG_DICT_TYPE = PER_CHANNEL_QCONFIG_DICT_TYPE = dict[str, Any]


def get_default_custom_qconfig_dict() -> BASE_QCONFIG_DICT_TYPE:
    """Int8, one scale for a weight."""
    return {"quantization_type": QuantizationType.PER_TENSOR_SYMMETRIC, "quantized_dtype": QuantizedDtype.INT8}


def get_default_per_channel_custom_qconfig_dict() -> PER_CHANNEL_QCONFIG_DICT_TYPE:
    """Int8, a scale for each output, which are the rows of a weight: its axis 0."""
    kind = QuantizationType.PER_CHANNEL_SYMMETRIC
    return {**get_default_custom_qconfig_dict(), "quantization_type": kind, "quantization_per_channel_axis": 0}


def get_default_expert_wise_per_channel_custom_qconfig_dict() -> PER_CHANNEL_QCONFIG_DICT_TYPE:
    """Int8, a scale for each output of each expert; weights of experts are ``[experts, inputs, outputs]``."""
    kind = QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC
    return {**get_default_custom_qconfig_dict(), "quantization_type": kind, "quantization_per_channel_axis": 2}


_TYPES = {one.value: one for one in QuantizationType}
_DTYPES = {one.value: one for one in QuantizedDtype} | {getattr(torch, "qint8", "qint8"): QuantizedDtype.INT8}
_NO_ACTIVATIONS = (None, "none", ActivationQuantizationType.NONE)


def scheme(config: Mapping[str, Any] | None, dims: int) -> tuple[QuantizedDtype, tuple[int, ...]]:
    """Return the dtype of a weight with ``dims`` dimensions, and those that have a scale for each index, none for one
    scale in all.

    Members may be given by their values, and a dtype as torch's. A linear layer has no experts: by expert is by output.
    Raises ParallelConfigError for what is not known.
    """
    rest = {**get_default_custom_qconfig_dict(), **(config or {})}
    kind, dtype, axis = (rest.pop(name, None) for name in FIELDS)
    kind, dtype = _TYPES.get(kind, kind), _DTYPES.get(dtype, dtype)
    rest["activations"] = rest.pop("activation_quantization_type", None) not in _NO_ACTIVATIONS
    if any(rest.values()) or not isinstance(kind, QuantizationType) or not isinstance(dtype, QuantizedDtype):
        raise ParallelConfigError(
            f"q_config is {config}: take a member of QuantizationType and one of QuantizedDtype, and leave out what "
            "the defaults do not have"
        )
    if kind is QuantizationType.PER_TENSOR_SYMMETRIC:
        return dtype, ()
    by_expert = kind is QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC
    axis = 0 if axis is None or (by_expert and dims == 2) else axis
    if not -dims <= axis < dims:
        raise ParallelConfigError(f"quantization_per_channel_axis={axis} of a weight of {dims} dimensions")
    return dtype, tuple(sorted({axis % dims, *([0] if by_expert else [])}))
