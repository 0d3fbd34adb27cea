"""Options of a command that are declared elsewhere, as parameters that typer understands."""

from __future__ import annotations

import enum
import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from nxd_infer.util.options import CommandOption


def with_options(options: Iterable[CommandOption]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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
        for option in options:
            if option.name not in parameters:
                parameters[option.name] = inspect.Parameter(
                    option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(option)
                )

        @functools.wraps(function)
        def command(**values: Any) -> Any:
            plain = {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}
            return function(**plain)

        vars(command)["__signature__"] = inspect.Signature(list(parameters.values()))
        command.__annotations__ = {name: one.annotation for name, one in parameters.items()}
        return command

    return decorate


def _annotation(option: CommandOption) -> Any:
    """The type of an option's value, with what typer needs."""
    kind, more = option.kind, {}
    if option.choices:
        kind = enum.Enum(option.name, {choice: choice for choice in option.choices}, type=str)
    elif option.kind in PARSERS:
        kind, more = Any, {"parser": PARSERS[option.kind], "metavar": "LIST"}
    if option.check is not None:
        more["callback"] = _checked(option.check)
    shown = typer.Option(
        option.flag,
        help=option.help,
        min=option.minimum,
        max=option.maximum,
        rich_help_panel=option.group,
        **more,
    )
    return Annotated[list[kind] | None if option.repeats else kind | None, shown]


def _checked(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a callback that turns a ValueError of ``check`` into a usage error."""

    def callback(value: Any) -> Any:
        try:
            return None if value is None else check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return callback


def whole_numbers(text: str) -> list[int]:
    """Parse ``"1,4,16"`` into ``[1, 4, 16]``, sorted, without duplicates. Raises typer.BadParameter."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 1,4,16") from None
    if numbers[0] < 1:
        raise typer.BadParameter(f"{numbers[0]} is below 1")
    return numbers


def words(text: str) -> list[str]:
    """Parse ``"a, b"`` into ``["a", "b"]``."""
    return [word.strip() for word in text.split(",")]


PARSERS: dict[Any, Callable[[str], Any]] = {list[int]: whole_numbers, list[str]: words}
