"""The command line's options, made of the settings: what each is called, takes and says."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, cast

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from nxd_server.settings import ServerSettings


@dataclass(frozen=True)
class SettingOption:
    """One setting as an option."""

    setting: str
    flag: str
    """``--name``; of one that is on or off ``--name/--no-name``."""
    group: str
    help: str
    kind: type
    """``bool``, ``int``, ``float``, ``str`` or ``Path``."""
    repeats: bool
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None


def setting_options() -> Iterator[SettingOption]:
    """Every setting, in the order in which they are declared."""
    for name, field in ServerSettings.model_fields.items():
        extra = cast("dict[str, Any]", field.json_schema_extra)
        kind, repeats, choices = _kind(field.annotation)
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            flag += "/--no-" + name.replace("_", "-")
        limits = {limit: getattr(one, limit) for one in field.metadata for limit in ("ge", "le") if hasattr(one, limit)}
        yield SettingOption(
            setting=name,
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
    """The type of one value, whether there may be several, and the values where only some are allowed."""
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
    """The setting's description, with its default where that is one value."""
    default = field.get_default(call_default_factory=True)
    words = [str(field.description)]
    if repeats:
        words.append("Repeat it for several.")
    elif isinstance(default, bool):
        words.append(f"Default: {'on' if default else 'off'}.")
    elif default is not None:
        words.append(f"Default: {default:g}." if isinstance(default, float) else f"Default: {default}.")
    return " ".join(words)
