"""What a quantized weight is: its dtype, and how many of its values share a scale."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypedDict

import torch

from nxd_infer.errors import ParallelConfigError


class QuantizationType(Enum):
    """What shares one scale. Scales are symmetric: zero is zero."""

    PER_TENSOR_SYMMETRIC = "per_tensor_symmetric"
    PER_CHANNEL_SYMMETRIC = "per_channel_symmetric"
    EXPERT_WISE_PER_CHANNEL_SYMMETRIC = "expert_wise_per_channel_symmetric"


class QuantizedDtype(Enum):
    INT8 = torch.int8
    F8E4M3 = torch.float8_e4m3fn
    F8E5M2 = torch.float8_e5m2


class ActivationQuantizationType(Enum):
    """Activations keep their dtype here."""

    NONE = None


class BASE_QCONFIG_DICT_TYPE(TypedDict):
    quantization_type: QuantizationType
    quantized_dtype: QuantizedDtype


class PER_CHANNEL_QCONFIG_DICT_TYPE(BASE_QCONFIG_DICT_TYPE):
    quantization_per_channel_axis: int
    """The dimension of the weight that has a scale for each index."""


def get_default_custom_qconfig_dict() -> BASE_QCONFIG_DICT_TYPE:
    """Int8, one scale for a weight."""
    return {
        "quantization_type": QuantizationType.PER_TENSOR_SYMMETRIC,
        "quantized_dtype": QuantizedDtype.INT8,
    }


def get_default_per_channel_custom_qconfig_dict() -> PER_CHANNEL_QCONFIG_DICT_TYPE:
    """Int8, a scale for each output, which are the rows of a weight."""
    return {
        "quantization_type": QuantizationType.PER_CHANNEL_SYMMETRIC,
        "quantized_dtype": QuantizedDtype.INT8,
        "quantization_per_channel_axis": 0,
    }


def get_default_expert_wise_per_channel_custom_qconfig_dict() -> PER_CHANNEL_QCONFIG_DICT_TYPE:
    """Int8, a scale for each output of each expert; weights of experts are ``[experts, inputs, outputs]``."""
    return {
        "quantization_type": QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC,
        "quantized_dtype": QuantizedDtype.INT8,
        "quantization_per_channel_axis": 2,
    }


_NEUTRAL = {"activation_quantization_type": (None, "none", ActivationQuantizationType.NONE), "clamp_bound": (None, 0)}
_TYPES = {one.value: one for one in QuantizationType}
_TYPES = {one.value: one for one in QuantizationType}
_DTYPES = {one.value: one for one in QuantizedDtype} | {getattr(torch, "qint8", "qint8"): QuantizedDtype.INT8}


def checked(config: Any) -> dict[str, Any]:
    """Return a configuration's type, dtype (of torch) and axis (None per tensor), as keywords of a quantized layer.

    Types may be their values, and dtypes torch's. Raises ParallelConfigError for a key or a value that is not known.
    """
    rest = dict(config)
    kind, dtype, axis = (
        rest.pop(key, default)
        for key, default in (
            ("quantization_type", QuantizationType.PER_TENSOR_SYMMETRIC),
            ("quantized_dtype", QuantizedDtype.INT8),
            ("quantization_per_channel_axis", None),
        )
    )
    for key, value in rest.items():
        if key not in _NEUTRAL or value not in _NEUTRAL[key]:
            raise ParallelConfigError(f"q_config has {key}={value!r}, which is not supported: leave it out")
    kind, dtype = _TYPES.get(kind, kind), _DTYPES.get(dtype, dtype)
    if not isinstance(kind, QuantizationType) or not isinstance(dtype, QuantizedDtype):
        raise ParallelConfigError(
            f"q_config has quantization_type={kind!r} and quantized_dtype={dtype!r}: take a member of "
            "QuantizationType and one of QuantizedDtype"
        )
    if kind is QuantizationType.PER_TENSOR_SYMMETRIC:
        axis = None
    elif axis is None:
        axis = 0
    return {"quantization_type": kind, "quantized_dtype": dtype, "quantization_per_channel_axis": axis}
