"""What a traced module returns: its single values, their names, and the form that holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from nxd_infer.artifact.structure import PLAIN

DROPPED = object()
"""Stands for an output that became a state: it is not returned."""


def leaves_of(result: Any) -> list[tuple[str, Any]]:
    """Return the tensors and other single values in ``result``, in order, each with its name.

    The name is the path of keys to it (``encoder.hidden.0``); "" if the outermost is a tuple or a list.
    """
    kind, children = _children(result)
    if kind is None:
        return [("", result)]
    keyed = kind not in ("tuple", "list")
    return [(".".join(path) if keyed else "", value) for path, value in _walk((), children)]


def form_of(result: Any, leaves: Iterable[Any]) -> Any:
    """Return the form of ``result``, with ``leaves`` in place of its single values; those :data:`DROPPED` are left out.

    A leaf is the name of an output, or a plain value.
    """
    return _form(result, iter(leaves))


def _children(value: Any) -> tuple[str | None, list[tuple[Any, Any]]]:
    """Return what ``value`` is, and its children with their keys; None for a single value."""
    if isinstance(value, (Tensor, *PLAIN)):
        return None, []
    if isinstance(value, tuple) and (names := getattr(value, "__match_args__", ())):  # also of torch.max(x, 0)
        return "namedtuple", list(zip(names, value, strict=True))
    if isinstance(value, (tuple, list)):
        return "tuple" if isinstance(value, tuple) else "list", list(enumerate(value))
    if dataclasses.is_dataclass(value):
        return "record", [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return "dict", list(value.items())
    if pytree.tree_is_leaf(value):
        return None, []
    pairs = pytree.tree_flatten_with_path(value, is_leaf=lambda one: one is not value)[0]
    return "record", [(key_text(path[0]), child) for path, child in pairs]


def _walk(path: tuple[str, ...], children: list[tuple[Any, Any]]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in children:
        kind, inner = _children(value)
        if kind is None:
            yield (*path, str(key)), value
        else:
            yield from _walk((*path, str(key)), inner)


def _form(value: Any, leaves: Iterator[Any]) -> Any:
    kind, children = _children(value)
    if kind is None:
        return next(leaves)
    pairs = [(key, _form(child, leaves)) for key, child in children]
    kept = [(key, form) for key, form in pairs if form is not DROPPED]
    if kind in ("tuple", "list"):
        return {kind: [form for _, form in kept]}
    if kind == "dict":
        return {kind: [[key if isinstance(key, PLAIN) else str(key), form] for key, form in kept]}
    return {kind: [list(pair) for pair in kept], **({"type": type(value).__name__} if kind == "namedtuple" else {})}


def key_text(part: Any) -> str:
    """Return the key of an entry of pytree's path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)
