"""Calls in the order, and with the names, of the reference, where they differ from the documented ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def also_in_order(order: str, when: Callable[[Sequence[Any]], bool]) -> Callable[[_Function], _Function]:
    """Let a function be called by place in a second ``order`` of its parameters too, where ``when(arguments)`` says so.

    ::

        @also_in_order("rows dtype bias", when=lambda given: len(given) > 1 and isinstance(given[1], torch.dtype))
        def make(rows, bias=True, dtype=None): ...

    The signature stays the function's own. An ``order`` that begins with ``self`` is a method's.
    """
    names = order.split()

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not when(args):
                return function(*args, **kwargs)
            named = dict(zip(names, args, strict=False))
            if len(args) > len(names):
                return function(*args, **kwargs)  # whose own message it is
            if twice := named.keys() & kwargs.keys():
                raise TypeError(f"{function.__qualname__}() got {', '.join(twice)} by place and by keyword")
            own = (named.pop("self"),) if "self" in named else ()
            return function(*own, **named, **kwargs)

        return cast(_Function, call)

    return decorate


def also_named(**own: str) -> Callable[[_Function], _Function]:
    """Let parameters be given by other names too: ``@also_named(checkpoint_dir_str="path")``."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for other in own.keys() & kwargs.keys():
                if own[other] in kwargs:
                    raise TypeError(f"{function.__name__}() got {own[other]!r} twice, also as {other!r}")
                kwargs[own[other]] = kwargs.pop(other)
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate
