"""Options of a command that are declared elsewhere, as parameters that typer understands."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import typer

from nxd_infer.errors import NxdError
from nxd_infer.util.options import Option, element


def with_options(options: Mapping[str, Option]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command that takes ``**given`` one option for each of ``options``, after its own parameters.

    ``given`` then holds each by its name, None if it is not given. Its own parameter replaces an option of the
    same name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = {
            name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            for name, one in inspect.signature(function).parameters.items()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        }
        for name, option in options.items():
            if name not in parameters:
                parameters[name] = inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(option)
                )

        vars(function)["__signature__"] = inspect.Signature(list(parameters.values()))
        function.__annotations__ = {name: one.annotation for name, one in parameters.items()}
        return function

    return decorate


def _annotation(option: Option) -> Any:
    """The type of an option's value, with what typer needs."""
    kind: Any = str if option.kind is object else option.kind
    more: dict[str, Any] = {}
    if option.choices:
        kind = Literal[option.choices]
    elif option.repeats:
        kind = element(kind) or str
    elif kind in PARSERS:
        kind, more = Any, {"parser": PARSERS[kind], "metavar": "LIST"}
    elif kind in (int, float):
        more = {"metavar": f"<{kind.__name__}{option.limits}>"}
    shown = typer.Option(
        option.flag,
        help=option.help,
        rich_help_panel=option.group,
        callback=_checked(option),
        **more,
    )
    return Annotated[list[kind] | None if option.repeats else kind | None, shown]


def _checked(option: Option) -> Callable[[Any], Any]:
    """Return a callback that makes a usage error of a value that the option cannot have."""

    def callback(value: Any) -> Any:
        try:
            return value if value is None or option.repeats else option.checked("it", value, ValueError)
        except (ValueError, NxdError) as error:
            raise typer.BadParameter(str(error)) from None

    return callback


def whole_numbers(text: str) -> list[int]:
    """Parse ``"1,4,16"`` into ``[1, 4, 16]``, sorted, without duplicates. Raises typer.BadParameter."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 1,4,16") from None


def words(text: str) -> list[str]:
    """Parse ``"a, b"`` into ``["a", "b"]``."""
    return [word.strip() for word in text.split(",")]


PARSERS: dict[Any, Callable[[str], Any]] = {list[int]: whole_numbers, list[str]: words}
