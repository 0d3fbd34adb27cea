"""Run a module on substituted tensors, and record what it assigned to itself meanwhile."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nxd_infer.errors import TraceError

log = logging.getLogger(__name__)


_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: tables of parameters, buffers and hooks."""


@contextlib.contextmanager
def swapped(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Replace the module's own tensors (under every name they have) by ``tensors`` inside the block.

    Yields a dictionary that holds, afterwards, what the module assigned to its buffers and parameters. A tensor that
    it keeps anywhere else (an attribute, a list) would be lost between calls and is an error that names it. A Python
    number that it changes causes a warning, because a graph keeps the value it was traced with.
    """
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    slots: dict[int, list[tuple[nn.Module, str, str]]] = {}
    names: dict[str, int] = {}
    empty: list[tuple[dict[str, Any], str, str]] = []
    for path, child in module.named_modules():
        for table in (child._parameters, child._buffers):
            saved.append((table, dict(table)))
            for name, value in table.items():
                qualified = _join(path, name)
                if value is None:
                    empty.append((table, name, qualified))
                    continue
                slots.setdefault(id(value), []).append((child, name, qualified))
                names[qualified] = id(value)
    attributes = _attributes(module)
    for path, child in module.named_modules(remove_duplicate=False):  # a module may have several names
        for name in (*child._parameters, *child._buffers):
            value = child._parameters.get(name, child._buffers.get(name))
            if value is not None:
                names.setdefault(_join(path, name), id(value))
    expected: list[tuple[nn.Module, str, str, Tensor]] = []
    replaced: dict[int, tuple[str, Tensor]] = {names[name]: (name, tensor) for name, tensor in tensors.items()}
    for key, places in slots.items():
        for child, name, qualified in places:
            if key in replaced:
                # As a buffer, because a module rejects a plain tensor under the name of a parameter.
                child._parameters.pop(name, None)
                child._buffers[name] = replaced[key][1]
                expected.append((child, name, *replaced[key]))
            else:
                expected.append((child, name, qualified, getattr(child, name)))
    changed: dict[str, Tensor] = {}
    try:
        yield changed
        _refuse_untied(slots)
        for child, name, qualified, value in expected:
            now = getattr(child, name, None)
            if now is not value and isinstance(now, Tensor):
                changed[qualified] = now
        filled = [qualified for table, name, qualified in empty if table.get(name) is not None]
    finally:
        for table, values in saved:
            table.clear()
            table.update(values)
    if filled:
        raise TraceError(
            f"the model assigns {filled[0]!r} while it runs, which is None before: a state has one shape from the "
            "start; register it with its first value (zeros, say)"
        )
    _compare(attributes, _attributes(module), {*slots, *(id(value) for _, _, _, value in expected)})


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse_untied(slots: Mapping[int, list[tuple[nn.Module, str, str]]]) -> None:
    """Raise for an assignment to one of several names of a tensor: one tensor is one state, and this would untie it."""
    for places in slots.values():
        now = {id(getattr(child, name, None)) for child, name, _ in places}
        if len(now) > 1:
            raise TraceError(
                f"the model assigns to one of {', '.join(repr(q) for _, _, q in places)} while it runs, which are one "
                "tensor: change it in place, or register a tensor of its own for each name"
            )


def _attributes(module: nn.Module) -> dict[str, tuple[nn.Module, str, Any, list[Tensor]]]:
    """Return what modules hold besides parameters and buffers: by qualified name, with the tensors in it."""
    return {
        _join(path, name): (child, name, value, _tensors_in(value))
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if name not in _OWN
    }


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple, dict, collections.deque)) and value:
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return []


def _compare(before: Mapping[str, Any], after: Mapping[str, Any], own: set[int]) -> None:
    """Reject a tensor that was stored in an attribute, and warn about a changed number.

    An attribute may list the module's ``own`` tensors anew: a recurrent layer does (``nn.LSTM``) if they were replaced.
    """
    for qualified, (child, name, value, held) in after.items():
        old = before.get(qualified, (child, name, None, []))
        if value is not old[2] and len(held) == len(old[3]) > 0 and all(id(tensor) in own for tensor in held):
            object.__setattr__(child, name, old[2])
            continue
        known = {id(tensor) for tensor in old[3]}
        if any(id(tensor) not in known for tensor in held):
            if qualified in before:
                object.__setattr__(child, name, old[2])
            else:
                object.__delattr__(child, name)
            raise TraceError(not_registered(qualified))
        if isinstance(value, (bool, int, float)) and isinstance(old[2], (bool, int, float)) and value != old[2]:
            log.warning(
                "the model changes %r from %r to %r while it runs; a traced model keeps the value it was traced with "
                "(make it a buffer if it is to be counted)",
                qualified,
                old[2],
                value,
            )


def not_registered(name: str) -> str:
    return (
        f"the model keeps a tensor in {name!r} while it runs, which is neither a buffer nor a parameter: register it "
        f"as a buffer (register_buffer({name.rpartition('.')[2]!r}, ...)), so that it is kept between calls"
    )
