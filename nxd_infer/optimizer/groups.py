"""Check and normalise an optimizer's parameters, in any form that PyTorch takes, with their names."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_infer.context import ParallelContext
from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.options import Kind, Option

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
NOT_HYPERPARAMETERS = ("params", "param_names")
ON_NONFINITE = ("raise", "skip")
NORM = Kind(
    "a number above 0",  # infinity, too: it clips nothing
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
)


def class_of(optimizer_class: Any) -> Any:
    """Return the class that a ``functools.partial`` calls; another argument itself."""
    return class_of(optimizer_class.func) if isinstance(optimizer_class, functools.partial) else optimizer_class


def require_supported(optimizer_class: type, zero1: bool, context: ParallelContext) -> None:
    """Raise ParallelConfigError for axes and optimizers that cannot train over ranks."""
    if context.cp.degree > 1:
        raise ParallelConfigError(
            f"training over the axis 'cp' is not supported yet, but its degree is {context.cp.degree}; use tensor, "
            "pipeline and data parallelism"
        )
    kind = class_of(optimizer_class)
    kind = kind if isinstance(kind, type) else object
    if issubclass(kind, torch.optim.LBFGS):
        raise ParallelConfigError(
            "LBFGS evaluates the model several times per step, which no rank can do alone; use AdamW"
        )
    if issubclass(kind, torch.optim.Adafactor | torch.optim.Muon) and (zero1 or context.tp.degree > 1):
        raise ParallelConfigError(
            f"{kind.__name__} needs whole matrices, but ZeRO-1 and tensor parallelism split them: use an elementwise "
            "optimizer such as AdamW, or train with data parallelism only"
        )


def checked_norm(name: str, norm: Any) -> float:
    """Return the clipping norm as a float. Raises ParallelConfigError unless it is a number above 0."""
    return float(Option(1.0, "", NORM).checked(name, norm, ParallelConfigError))


def in_order(parameters: Parameters) -> list[Any]:
    """Return parameters or groups as a list, of which PyTorch checks the rest. Raises TypeError for a set."""
    if isinstance(parameters, set | frozenset):
        raise TypeError("the parameters are a set, whose order differs from rank to rank: pass a list")
    if isinstance(parameters, Tensor | dict):
        what = "tensor" if isinstance(parameters, Tensor) else "dict"
        raise TypeError(f"an optimizer takes an iterable of parameters or of groups, not one {what}")
    return list(parameters)


def require_once(group: dict[str, Any]) -> None:
    if len(set(map(id, group["params"]))) < len(group["params"]):
        raise ParallelConfigError("a parameter is more than once in the optimizer's groups; pass each only once")


def require_unchanged(groups: list[dict[str, Any]], taken: list[list[Tensor]]) -> None:
    """Raise ParallelConfigError if ``groups`` have other parameters than were ``taken``; their order does not matter.

    The wrapped optimizer has groups of its own, which do not follow a change.
    """
    changes = [] if len(groups) == len(taken) else [f"it has {len(groups)} groups instead of {len(taken)}"]
    for number, (group, old) in enumerate(zip(groups, taken, strict=False)):
        changes += [f"group {number} has {name} in addition" for name in _only_in(group["params"], old)]
        changes += [f"group {number} lacks {name}" for name in _only_in(old, group["params"])]
    if changes:
        more = f" and {len(changes) - 8} more changes" if len(changes) > 8 else ""
        raise ParallelConfigError(
            f"param_groups was changed, which this optimizer cannot follow: {'; '.join(changes[:8])}{more}. To train "
            'more parameters, call optimizer.add_param_group({"params": [...]}); for other changes, make a new '
            "optimizer"
        )


def _only_in(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[str]:
    """Return the names of parameters that ``others`` lack, or have less often."""
    rest = Counter(map(id, some)) - Counter(map(id, others))
    return [
        repr(getattr(param, "nxd_name", None) or f"parameter {place} of shape {tuple(param.shape)}")
        for place, param in enumerate(some)
        if id(param) in rest
    ]


def require_frozen(taken: list[list[Tensor]], trained: list[Tensor]) -> None:
    """Raise ParallelConfigError if a parameter was ``taken``, but not to be trained, and has a gradient now."""
    known = set(map(id, trained))
    thawed = [param for some in taken for param in some if param.grad is not None and id(param) not in known]
    if thawed:
        raise ParallelConfigError(
            f"{len(thawed)} parameter(s) got a gradient but were frozen when the optimizer was created; "
            "create the optimizer after setting requires_grad"
        )


def with_defaults(group: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """Return a user's group, with missing hyperparameters taken from the wrapped optimizer."""
    return {**{k: v for k, v in inner.items() if k not in NOT_HYPERPARAMETERS}, **group}


def parameter_names(groups: list[dict[str, Any]], params: list[Tensor], taken: list[str], first: int) -> list[str]:
    """Return the parameters' names in the model, or their positions if they have no name or a duplicate one.

    ``taken`` are the names in use; ``first`` is the number of the first group.
    """
    used, known = set(taken), {}
    for number, group in enumerate(groups, first):
        given_names = group.get("param_names") or [None] * len(group["params"])
        for place, (param, name) in enumerate(zip(group["params"], given_names, strict=True)):
            name = name or getattr(param, "nxd_name", None)
            known[id(param)] = name if name and name not in used else f"group {number} parameter {place}"
            used.add(known[id(param)])
    return [known[id(param)] for param in params]
