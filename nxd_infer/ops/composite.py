"""How a composite operator is made: of its schema, its plain PyTorch reference, and the shapes of its results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

LIBRARY = torch.library.Library("nxd", "FRAGMENT")
COMPOSITE: dict[Any, Callable[..., Any]] = {}
"""``OpOverload -> reference``. Both take the same positional arguments."""
FAKES: dict[str, Callable[..., Any]] = {}
"""Fake kernels (shapes only) by operator, shared with the native operators of the same names."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def composite(schema: str, fake: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Register the decorated reference as ``torch.ops.nxd`` operator of ``schema``, and replace it by a function that
    calls the operator. ``fake`` takes the operator's arguments, and returns empty results."""

    def define(reference: _Function) -> _Function:
        name = schema.partition("(")[0]
        LIBRARY.define(schema)
        LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"nxd::{name}", fake, lib=LIBRARY)
        operator = getattr(torch.ops.nxd, name).default
        COMPOSITE[operator], FAKES[name] = reference, fake
        signature = inspect.signature(reference)

        @functools.wraps(reference)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return operator(*bound.args)

        return call  # pyright: ignore[reportReturnType]

    return define
