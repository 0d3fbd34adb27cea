"""Calls in the order and with the keywords of the reference, where they differ from the documented ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nxd_infer.errors import ParallelConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def refusal(neutral: Mapping[str, Any], name: str, value: Any) -> str:
    """Say that a keyword is not taken with this value; "" if it is."""
    if name not in neutral or value == neutral[name]:
        return ""
    return f"{name}={value!r} is not supported: leave it out, or pass {neutral[name]!r}"


def refused_value(function: Any, given: Mapping[str, Any]) -> str:
    """Say which keyword argument a function or class refuses because of its value, ``...`` if that is not known."""
    neutral = getattr(function.__init__ if isinstance(function, type) else function, "_neutral", {})
    return next(filter(None, (refusal(neutral, name, value) for name, value in given.items() if value is not ...)), "")


def also_called(
    order: str = "",
    when: Callable[[Sequence[Any]], bool] = lambda given: False,
    ignored: str = "",
    neutral: Mapping[str, Any] = {},
    renamed: Mapping[str, str] = {},
) -> Callable[[_Function], _Function]:
    """Let a function be called by place in a second ``order`` of its parameters too, where ``when(arguments)`` says so.

    ``ignored`` keywords have no effect, ``neutral`` ones must have their value (else ParallelConfigError), and
    ``renamed`` ones stand for a parameter. An ``order`` that begins with ``self`` is a method's.
    """
    names, more = order.split(), {**dict.fromkeys(ignored.split()), **neutral, **dict.fromkeys(renamed)}

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if when(args) and len(args) <= len(names):
                named = dict(zip(names, args, strict=False))
                if twice := named.keys() & kwargs.keys():
                    raise TypeError(f"{function.__qualname__}() got {', '.join(twice)} by place and by keyword")
                args, kwargs = (named.pop("self"),) if "self" in named else (), {**named, **kwargs}
            for name in more.keys() & kwargs.keys():
                value = kwargs.pop(name)
                if renamed.get(name, name) in kwargs:
                    raise TypeError(f"{function.__qualname__}() got {renamed[name]!r} twice, also as {name!r}")
                if name in renamed:
                    kwargs[renamed[name]] = value
                elif problem := refusal(neutral, name, value):
                    raise ParallelConfigError(problem)
            return function(*args, **kwargs)

        own = inspect.signature(function)
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=more[name]) for name in more]
        kept = list(own.parameters.values())
        at = next((i for i, one in enumerate(kept) if one.kind is one.VAR_KEYWORD), len(kept))
        vars(call)["_neutral"] = neutral
        call.__signature__ = own.replace(parameters=[*kept[:at], *added, *kept[at:]])  # pyright: ignore
        return call  # pyright: ignore[reportReturnType]

    return decorate
