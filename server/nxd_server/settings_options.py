"""The command line's options, derived from the settings: each one's name, type and help."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, cast

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from nxd_infer.util.options import CommandOption, with_default
from nxd_server.settings import ServerSettings


def setting_options() -> Iterator[CommandOption]:
    """Yield every setting in the order of declaration."""
    for name, field in ServerSettings.model_fields.items():
        extra = cast("dict[str, Any]", field.json_schema_extra)
        kind, repeats, choices = _kind(field.annotation)
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            flag += "/--no-" + name.replace("_", "-")
        limits = {limit: getattr(one, limit) for one in field.metadata for limit in ("ge", "le") if hasattr(one, limit)}
        yield CommandOption(
            name=name,
            flag=extra["option"] or flag,
            group=extra["group"],
            help=_help(field, repeats),
            kind=kind,
            repeats=repeats,
            choices=choices,
            minimum=limits.get("ge"),
            maximum=limits.get("le"),
        )


def _kind(annotation: Any) -> tuple[type, bool, tuple[str, ...]]:
    """Return the type of one value, whether the option repeats, and the allowed values if there are only some."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _kind(next(one for one in arguments if one is not type(None)))
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is list:
        return _kind(arguments[0])[0], True, ()
    if origin is Literal:
        return str, False, arguments
    return str if annotation is SecretStr else annotation, False, ()


def _help(field: FieldInfo, repeats: bool) -> str:
    """Return the setting's description, followed by its default if that is a single value."""
    if repeats:
        return f"{field.description} Repeat it for several."
    return with_default(str(field.description), field.get_default(call_default_factory=True))
