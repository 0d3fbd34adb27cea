"""Convert tensors to and from JSON without silent changes: a value that does not fit its dtype is rejected."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nxd_infer.util.dtypes import dtype_name
from nxd_server.http.error_responses import bad_request, check_fields, clip, missing_field, wrong

MOST_DIMENSIONS = 64
MOST_NUMBERS = 2**40
DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}


def tensor_from_json(value: Any, default: torch.dtype | None, field: str) -> torch.Tensor:
    """Return nested lists (or a number), or ``{"data": ..., "dtype": ..., "shape": ...}``, as a tensor.

    Without a ``dtype`` the graph's (``default``) is used, or int64, float32 or bool, depending on the values.

    Raises:
        ApiError: 400 naming ``field``: ragged lists, mixed types, a number the dtype cannot hold, a wrong shape.
    """
    shape: list[int] | None = None
    dtype = default
    if isinstance(value, dict):
        check_fields(value, ("data", "dtype", "shape"), field)
        if "data" not in value:
            raise missing_field(f"{field}.data")
        if (name := value.get("dtype")) is not None:
            if not isinstance(name, str) or name not in DTYPES:
                raise wrong(f"{field}.dtype", f"must be one of {', '.join(DTYPES)}")
            dtype = DTYPES[name]
        if (shape := value.get("shape")) is not None:
            if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
                raise wrong(f"{field}.shape", "must be a list of sizes")
            _check_shape(shape, f"{field}.shape")
        value = value["data"]
    flat, own_shape = _flatten(value, field)
    tensor = _convert(flat, dtype, field)
    shape = own_shape if shape is None else shape
    if math.prod(shape) != len(flat):
        raise bad_request(f"`{field}`: {len(flat)} values do not fill the shape {shape}", field)
    return tensor.reshape(shape)


def _check_shape(shape: Sequence[int], field: str) -> None:
    """Also checked for a tensor without elements, because libraries multiply its sizes anyway."""
    if len(shape) > MOST_DIMENSIONS or math.prod(max(1, size) for size in shape) > MOST_NUMBERS:
        raise wrong(field, "is not the shape of a tensor that a model takes")


def _flatten(value: Any, field: str) -> tuple[list[Any], list[int]]:
    """Return the numbers in order, and the shape given by the nesting; lists among them where it is ragged."""
    array = np.array(value, dtype=object)
    _check_shape(array.shape, field)
    return array.ravel().tolist(), list(array.shape)


def _convert(flat: list[Any], dtype: torch.dtype | None, field: str) -> torch.Tensor:
    kinds = set(map(type, flat))
    if not kinds <= {int, float, bool} or (bool in kinds and len(kinds) > 1):
        if list in kinds:
            raise wrong(field, "is ragged, or too deep: rows of it differ in length")
        raise wrong(field, "must hold numbers only, or booleans only")
    if dtype is None:
        dtype = torch.bool if bool in kinds else torch.float32 if float in kinds or not kinds else torch.int64
    name = dtype_name(dtype)
    if (dtype is torch.bool) != (bool in kinds) and kinds:
        raise bad_request(
            f"`{field}`: {name} takes {'true and false' if dtype is torch.bool else 'numbers'} only", field
        )
    if dtype is torch.bool:
        return torch.tensor(flat, dtype=dtype)
    if dtype.is_floating_point:
        return _floats(flat, dtype, name, field)
    if float in kinds:
        raise bad_request(f"`{field}`: {name} takes whole numbers only", field)
    info = torch.iinfo(dtype)
    if flat and not (info.min <= min(flat) and max(flat) <= info.max):
        raise bad_request(f"`{field}`: a value is not in {name}'s range {info.min} .. {info.max}", field)
    return torch.tensor(flat, dtype=dtype)


def _floats(flat: list[Any], dtype: torch.dtype, name: str, field: str) -> torch.Tensor:
    try:
        tensor = torch.tensor(flat, dtype=torch.float64).to(dtype)
        finite = bool(torch.isfinite(tensor).all())
    except (OverflowError, RuntimeError, ValueError):
        tensor, finite = torch.empty(0), False
    if not finite:
        raise bad_request(f"`{field}`: a value is beyond {name}'s range", field)
    return tensor


def tensor_to_json(tensor: torch.Tensor) -> dict[str, Any]:
    """Return ``{"dtype", "shape", "data"}``; values without a JSON number become "NaN", "Infinity" or "-Infinity"."""
    data = tensor.tolist()
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        data = _spell(data)
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data": data}


def _spell(value: Any) -> Any:
    if isinstance(value, list):
        return [_spell(item) for item in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def tensors_from_safetensors(text: str, field: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a base64 safetensors file. Raises ApiError 400 naming ``field`` if it is not one."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise wrong(field, "is not base64") from None
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError, OverflowError) as error:
        why = str(error).partition("\n")[0]
        raise wrong(field, f"is not a safetensors file: {why}") from None
    for name, tensor in tensors.items():
        _check_shape(tensor.shape, f"{field}.{clip(name)}")
    return tensors


def tensors_to_safetensors(tensors: dict[str, torch.Tensor]) -> str:
    from safetensors.torch import save

    return base64.b64encode(save({name: tensor.contiguous() for name, tensor in tensors.items()})).decode("ascii")
