"""The form of what a traced model returns, as JSON, and the value that it stands for.

An output is its name. Everything else is an object with one entry that says what it is::

    {"tuple": ["logits", {"value": null}, {"list": ["hidden.0", "hidden.1"]}]}

A number that JSON does not have is a text, as ``{"number": "nan"}``.
A server has none of the model's classes: a named tuple becomes one of the same name and fields, a dataclass and an
output of transformers a :class:`Record`.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

PLAIN = (type(None), bool, int, float, str)


class Record(dict[str, Any]):
    """Named values, also as attributes and by number. Those that are None are attributes alone, as in transformers."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__({name: value for name, value in values.items() if value is not None})
        vars(self).update(values)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(dict.values(self))[key]


def filled(form: Any, outputs: Mapping[str, Any]) -> Any:
    """Return the value that ``form`` stands for."""
    if isinstance(form, str):
        return outputs[form]
    (kind, content), *_ = form.items()
    if kind == "value":
        return content
    if kind == "number":
        return float(content)
    if kind in ("tuple", "list"):
        several = [filled(one, outputs) for one in content]
        return several if kind == "list" else tuple(several)
    named = {key: filled(one, outputs) for key, one in content}
    if kind == "record":
        return Record(named)
    if kind == "namedtuple":
        return collections.namedtuple(str(form.get("type")), list(named), rename=True)(*named.values())
    return named


def names_in(form: Any) -> list[str]:
    """Return the outputs' names in ``form``. Raises ValueError for what is no form."""
    if isinstance(form, str):
        return [form]
    kind, content = next(iter(form.items())) if isinstance(form, dict) and form else ("", None)
    if (kind == "value" and isinstance(content, PLAIN)) or (kind == "number" and content in ("nan", "inf", "-inf")):
        return []
    if kind in ("tuple", "list") and isinstance(content, list):
        return [name for one in content for name in names_in(one)]
    keys = PLAIN if kind == "dict" else str
    pairs = isinstance(content, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], keys) for pair in content
    )
    if kind == "namedtuple" and not str(form.get("type", "")).isidentifier():
        pairs = False
    if pairs and isinstance(content, list) and kind in ("dict", "record", "namedtuple"):
        return [name for _, one in content for name in names_in(one)]
    raise ValueError(f"{str(form)[:80]} says nothing of a value's form")
