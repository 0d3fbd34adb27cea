"""A batch in microbatches, and how much each counts in the loss of the whole batch."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_unflatten

from nxd_infer.errors import InputMismatchError
from nxd_infer.parallel_layers.loss_functions import IGNORED
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


LABELS = "labels"

Count = Callable[[Tensor], Tensor]
"""The labels of a microbatch to the number of targets that its loss is the mean of."""


def split_batch(inputs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Split every tensor of a batch along its first dimension into ``count`` equal parts; other values are in each.

    Tensors in tuples, lists and dicts are split too. Raises InputMismatchError if tensors have different numbers of
    rows, or one that ``count`` does not divide.
    """
    leaves, spec = tree_flatten_with_path(dict(inputs))
    rows = {_name(path): x.shape[0] for path, x in leaves if isinstance(x, Tensor) and x.dim()}
    if count > 1 and len(set(rows.values())) > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in rows.items())
        raise InputMismatchError(
            f"the inputs have different numbers of rows ({sizes}), and microbatches are rows of all of them: give a "
            "tensor that belongs to the whole batch to the model as a buffer, or expand it to a row for each"
        )
    for name, size in rows.items():
        if size % count or not size:
            fits = [number for number in range(1, size + 1) if size % number == 0]
            raise InputMismatchError(
                f"{name} has {size} rows, which num_microbatches={count} does not divide: use one of {fits}, or pass "
                f"a multiple of {count} rows"
            )
    parts = [x.chunk(count) if isinstance(x, Tensor) and x.dim() else [x] * count for _, x in leaves]
    return [tree_unflatten([several[number] for several in parts], spec) for number in range(count)]


def _name(path: Any) -> str:
    """The name of an input, and where in it a tensor is."""
    return f"{path[0].key!r}{keystr(path[1:])}"


def probes_of(inputs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the inputs with other labels, which show by their losses what a model's loss is the mean of.

    ``"all"``: no label is ignored; ``"last"`` and ``"first"``: all are but those of the last or first column, or row if
    there is one dimension. Nothing without integer labels, or if they are too few.
    """
    labels = inputs.get(LABELS)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool or not labels.dim():
        return {}
    dim = min(1, labels.dim() - 1)
    if labels.shape[dim] < 3:
        return {}
    every, none = torch.zeros_like(labels), torch.full_like(labels, IGNORED)
    last, first = none.clone(), none.clone()
    last.narrow(dim, labels.shape[dim] - 1, 1).zero_()
    first.narrow(dim, 0, 1).zero_()
    return {name: {**inputs, LABELS: one} for name, one in (("all", every), ("last", last), ("first", first))}


def count_of(losses: Mapping[str, float]) -> Count | None:
    """Return how a model counts the targets that its loss is the mean of; None if it counts ignored ones too.

    ``losses``: for the inputs of :func:`probes_of`, from a model that finds all classes equally likely, so that every
    target costs the same. A causal model predicts the next token: it leaves the first label of a row out.
    """
    if not losses or not _near(losses["last"], losses["all"]):
        return None
    if _near(losses["first"], losses["all"]):
        return lambda labels: (labels != IGNORED).sum()
    return lambda labels: (labels[:, 1:] != IGNORED).sum()


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-2) and other != 0


def loss_weights(parts: list[dict[str, Any]], count: Count | None) -> Tensor:
    """Return the weight of each microbatch's loss in that of the batch, float64 [microbatches].

    They are the shares of the targets, so that the loss is the mean over the batch; without a ``count`` they are equal.
    With Hugging Face's ``num_items_in_batch`` a loss is a sum already.
    """
    if parts[0].get("num_items_in_batch") is not None:
        return torch.ones(len(parts), dtype=torch.float64)
    if count is None or len(parts) == 1:
        return torch.full((len(parts),), 1 / len(parts), dtype=torch.float64)
    counts = torch.stack([count(part[LABELS]).cpu() for part in parts]).double()
    if not counts.any():
        return counts + float("nan")  # as the mean over no target is
    return counts / counts.sum()
