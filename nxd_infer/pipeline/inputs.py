"""What a step of a pipeline is given: inputs by name, and what the stages compare of them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nxd_infer.errors import InputMismatchError
from nxd_infer.pipeline.stage import own_forward
from nxd_infer.util.suggest import did_you_mean

SAMPLES = 1024
"""Elements of each tensor by which stages see that they have the same batch."""


def signature_of(inputs: Mapping[str, Any]) -> str:
    """What of the inputs a plan depends on: the shapes of tensors, and other values."""
    shapes = tree_map(lambda x: (tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else x, dict(inputs))
    return ", ".join(f"{name}={value!r}" for name, value in shapes.items())


def sample_of(value: Any) -> bytes:
    """Bytes of at most SAMPLES elements of a tensor, evenly spread: other batches hardly have the same."""
    if not isinstance(value, Tensor) or not value.numel():
        return b""
    flat = value.detach().reshape(-1)
    return flat[:: -(-len(flat) // SAMPLES)].contiguous().cpu().view(torch.uint8).numpy().tobytes()


def digest_of(parts: Iterable[bytes]) -> int:
    """Return a number of 56 bits."""
    found = hashlib.blake2b(digest_size=7)
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest(), "big")


def named_inputs(
    model: nn.Module, names: Sequence[str] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the inputs of a call by name. Raises InputMismatchError for what is not in ``names``."""
    parameters = inspect.signature(own_forward(model)).parameters.values()
    known = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.KEYWORD_ONLY]
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    order = list(names) if names else known
    if len(args) > len(order):
        raise InputMismatchError(f"the model takes the inputs {', '.join(order)}, got {len(args)} positional ones")
    found = {**dict(zip(order, args, strict=False)), **kwargs}
    for name in kwargs:
        if (names and name not in names) or (not names and name not in known and not takes_more):
            where = "input_names" if names else "the parameters of the model's forward"
            raise InputMismatchError(f"{name!r} is not in {where}: {', '.join(order)}{did_you_mean(name, order)}")
    if len(kwargs) + len(args) > len(found):
        raise InputMismatchError(f"an input was given twice: by position, and as {', '.join(kwargs)}")
    return found
