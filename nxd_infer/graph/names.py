"""Names of example inputs (from forward's signature), of tensors (where a module keeps them) and of states."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nxd_infer.errors import TraceConfigError
from nxd_infer.layout.shard import named_tensors


def named_inputs(module: nn.Module, example: Any, where: str = "example_inputs") -> tuple[dict[str, Tensor], bool]:
    """Return ``example`` as named contiguous tensors in order, and whether they are passed by keyword.

    A tensor, a tuple or list of tensors (positional), or a dictionary (by name). Nested lists are flattened, their
    entries named like ``past.0``. Raises TraceConfigError naming a value that is not a tensor or has no parameter.
    """
    module = _innermost(module)
    parameters = inspect.signature(module.forward).parameters
    kinds = inspect.Parameter
    if isinstance(example, Mapping):
        anything = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
        unknown = [] if anything else [name for name in example if name not in parameters]
        if unknown:
            raise TraceConfigError(
                f"{where} names {', '.join(map(repr, unknown))}, but {type(module).__name__}.forward takes "
                f"{', '.join(parameters)}"
            )
        pairs = list(example.items())
    else:
        values = [example] if isinstance(example, Tensor) else list(example)
        positional = [
            p.name for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        star = next((p.name for p in parameters.values() if p.kind is kinds.VAR_POSITIONAL), None)
        if len(values) > len(positional) and star is None:
            raise TraceConfigError(
                f"{where} holds {len(values)} inputs, but {type(module).__name__}.forward takes {len(positional)} "
                f"({', '.join(positional)})"
            )
        names = positional + [f"{star}_{i}" for i in range(len(values) - len(positional))]
        pairs = list(zip(names, values, strict=False))
    flat: dict[str, Tensor] = {}
    for name, value in pairs:
        leaves = pytree.tree_flatten_with_path(value)[0]
        if not leaves:
            raise TraceConfigError(
                f"{where}: {name!r} is an empty {type(value).__name__}; only tensors are inputs of a traced model: "
                "give the inputs by name and leave it out"
            )
        for path, leaf in leaves:
            key = ".".join([name, *(key_text(part) for part in path)])
            if not isinstance(leaf, Tensor):
                raise TraceConfigError(
                    f"{where}: {key!r} is {type(leaf).__name__}; only tensors are inputs of a traced model: "
                    "give the model its other arguments inside func, or give the inputs by name and leave it out"
                )
            flat[key] = leaf.detach().clone(memory_format=torch.contiguous_format)
    return flat, isinstance(example, Mapping)


def _innermost(module: nn.Module) -> nn.Module:
    """Return the module whose inputs ``module`` takes: a wrapper's ``forward`` passes on whatever it gets."""
    kinds = {p.kind for p in inspect.signature(module.forward).parameters.values()}
    inner = module._modules.get("module")
    if inner is None or kinds != {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return module
    return _innermost(inner)


def key_text(part: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)


def shared_memory(module: nn.Module) -> dict[str, str]:
    """Map each parameter, buffer or tensor attribute that overlaps another tensor of the module to that one's name.

    Two names of one tensor are not an overlap.
    """
    tensors = {**{id(t): (name, t) for name, t in reversed(named_tensors(module).items())}}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor):
                tensors.setdefault(id(value), (f"{path}.{name}" if path else name, value))
    places: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.values():
        if tensor.layout == torch.strided and tensor.numel():
            start = int(tensor.storage_offset()) * tensor.element_size()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            end = start + (int(last) + 1) * tensor.element_size()
            places.setdefault(tensor.untyped_storage()._cdata, []).append((start, end, name))
    found: dict[str, str] = {}
    for group in places.values():
        widest = None  # of the tensors that begin earlier, the one with the highest end
        for start, end, name in sorted(group):
            if widest is not None and start < widest[0]:
                found.setdefault(name, widest[1])
                found.setdefault(widest[1], name)
            if widest is None or end > widest[0]:
                widest = (end, name)
    return found


def state_names(module: nn.Module, keys: Iterable[Any]) -> list[str]:
    """Return the qualified names of states given by name or as tensors. Raises TraceConfigError for one without."""
    tensors = named_tensors(module)
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)  # the first of its names
    found = []
    for key in keys:
        name = names.get(id(tensors.get(key) if isinstance(key, str) else key))
        if name is None:
            raise TraceConfigError(_unknown_state(module, key, list(tensors)))
        found.append(name)
    return found


def _unknown_state(module: nn.Module, key: Any, names: list[str]) -> str:
    if isinstance(key, str):
        return (
            f"the state {key!r} is not a buffer or parameter of {type(module).__name__}; it has "
            f"{', '.join(names[:12]) or 'none'}{', ...' if len(names) > 12 else ''}"
        )
    kind = f"a {type(key).__name__}" if not isinstance(key, Tensor) else f"a tensor of shape {tuple(key.shape)}"
    return (
        f"{kind} is given as a state but is not a buffer or parameter of {type(module).__name__}: "
        "register it with register_buffer, so that it stays with the rank"
    )
