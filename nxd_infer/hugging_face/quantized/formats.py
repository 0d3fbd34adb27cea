"""Which format a ``config.json`` says that the weights have; refuses by name what is not read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.quantized.compressed_tensors import CompressedTensors
from nxd_infer.hugging_face.quantized.fields import FIELD, checked
from nxd_infer.hugging_face.quantized.fp8 import Fp8
from nxd_infer.hugging_face.quantized.layers import Format
from nxd_infer.hugging_face.quantized.qweight import Awq, Gptq

FORMATS: dict[str, Any] = {"gptq": Gptq, "awq": Awq, "compressed-tensors": CompressedTensors, "fp8": Fp8}
"""By ``quant_method``."""
FIELDS = (FIELD, "compression_config")
"""The second is an old name."""


def format_of(raw: Mapping[str, Any], origin: str = "config.json") -> Format | None:
    """Return how the weights beside a ``config.json`` with the content ``raw`` are stored; None if plainly.

    Raises ModelConfigError naming the field of what is not read.
    """
    text = raw.get("text_config")
    places = [("", raw), *([("text_config.", text)] if isinstance(text, Mapping) else [])]
    found = [(f"{inside}{name}", place[name]) for inside, place in places for name in FIELDS if place.get(name)]
    if not found:
        return None
    field, given = found[0]
    given = given if isinstance(given, Mapping) else {"quant_method": given}
    old = given.get("load_in_4bit") or given.get("load_in_8bit")
    method = given.get("quant_method") or ("bitsandbytes" if old else None)
    if not isinstance(method, str) or method not in FORMATS:
        raise ModelConfigError(
            f"{origin}: {field}.quant_method = {method!r}: only weights of {', '.join(FORMATS)} are read quantised: "
            "have transformers load the model, call its dequantize() and save it, or use the model in another form"
        )
    return checked(FORMATS[method], given, origin, field)


def format_in(folder: Path) -> Format | None:
    """:func:`format_of` a directory; what is wrong with its ``config.json`` otherwise is told where it is read."""
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return format_of(raw, str(file)) if isinstance(raw, Mapping) else None


def dequantized(raw: Mapping[str, Any], origin: str = "config.json") -> dict[str, Any]:
    """Return the content of a ``config.json`` for the same model with plain weights. Raises like :func:`format_of`."""
    format_of(raw, origin)
    plain = {name: value for name, value in raw.items() if name not in FIELDS}
    if isinstance(text := raw.get("text_config"), Mapping):
        plain["text_config"] = {name: value for name, value in text.items() if name not in FIELDS}
    return plain
