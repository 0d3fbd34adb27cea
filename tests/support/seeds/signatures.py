"""Signatures as the documents print them, and those of this package in the same form."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any


def documented(text: str) -> dict[str, list[str]]:
    """The parameters by name of each printed call; a long one goes on in indented lines."""
    entries = (entry.partition("(") for entry in re.split(r"\n(?=\S)", text.strip()))
    return {name: re.split(r",\s+", rest.removesuffix(")")) if rest != ")" else [] for name, _, rest in entries}


def by_place(call: Callable[..., Any]) -> list[str]:
    """The parameters that may be given by place, with their defaults; ``self`` is not printed."""
    parameters = inspect.signature(call).parameters.values()
    return [shown(p) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]


def shown(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is parameter.empty:
        return parameter.name
    if isinstance(default, Mapping):
        default = dict(default)
    return f"{parameter.name}={default.__name__ if inspect.isfunction(default) else repr(default)}"
