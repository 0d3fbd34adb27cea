"""Options that are declared once, as the fields of a dataclass.

::

    @dataclass
    class TraceOptions:
        tp_degree: int = option(1, "Number of ranks.", flag="--tp", kind=int, minimum=1)

    @accepts_options(TraceOptions)
    def trace(options: TraceOptions) -> Model:
        '''Trace a model. ...{arguments}'''

    trace(tp_degree=2)

The function's signature and documentation, the options of a command (:func:`command_options`) and the table in the
documents (:func:`table`) are made from the fields, so a new option is one new field.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Record = TypeVar("Record")
Result = TypeVar("Result")

Check = Callable[[str, Any], None]
"""``(name, value)``; raises a typed error for a value that the option cannot have."""


@dataclass(frozen=True)
class Option:
    """What a field declares besides its name, type and default."""

    help: str
    """What it does; shown in Python, on the command line and in the documents."""
    details: str = ""
    """Further sentences for a caller from Python."""
    check: Check | None = None
    """For what kind, limits and choices cannot express; those are checked without it."""
    flag: str | None = None
    """The option of a command; None: commands do not offer it."""
    kind: Any = str
    """Type of the value on a command line; ``list[int]`` and ``list[str]`` are typed with commas. ``int`` and
    ``list[int]`` hold from Python too."""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    command_default: Any = None
    """The command's default, if it is not the field's."""


@dataclass(frozen=True)
class CommandOption:
    """An option of a command. Its value is None unless it is given, so the default stays where it is declared."""

    name: str
    flag: str
    """``--name``; of one that is on or off ``--name/--no-name``."""
    help: str
    kind: Any
    """``bool``, ``int``, ``float``, ``str`` or ``Path``; ``list[int]`` and ``list[str]`` are typed with commas."""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[Any], Any] | None = None
    """Raises ValueError for a value that the option cannot have."""
    repeats: bool = False
    """Whether it may be given several times, for several values."""
    group: str | None = None
    """The heading in the command's help."""


def option(default: Any, help: str, **declared: Any) -> Any:
    """A field of a dataclass of options; ``declared`` as in :class:`Option`. ``...``: it has no default."""
    return field(default=MISSING if default is ... else default, metadata={"option": Option(help, **declared)})


def declared(options: type) -> dict[str, Option]:
    """What is declared of each field, by name, in order."""
    return {one.name: one.metadata["option"] for one in fields(options)}


def defaults(options: type) -> dict[str, Any]:
    """The default of each field that has one."""
    return {one.name: one.default for one in fields(options) if one.default is not MISSING}


def check_each(options: Any, error: type[Exception]) -> None:
    """Check the value of each field by itself, unless it is the default. Raises ``error``, or what a check raises."""
    known = defaults(type(options))
    for name, one in declared(type(options)).items():
        value = getattr(options, name)
        if name in known and value is known[name]:
            continue
        if one.kind is int:
            whole_number(name, value, error, one.minimum, one.maximum)
        elif one.kind == list[int]:
            _whole_numbers(name, value, error, one)
        elif isinstance(value, str) and one.choices and value not in one.choices:
            optional = ", or None" if known.get(name, ...) is None else ""
            raise error(f"{name}={value!r} is not one of {', '.join(map(repr, one.choices))}{optional}")
        if one.check is not None:
            one.check(name, value)


def whole_number(
    name: str, value: Any, error: type[Exception], minimum: float | None = None, maximum: float | None = None
) -> int:
    """Return ``value``; raise ``error``, which calls it ``name``, unless it is a whole number in these limits."""
    if not _is_whole(value, minimum, maximum):
        raise error(f"{name} must be a whole number{_limits(minimum, maximum)}, got {value!r}")
    return value


def _whole_numbers(name: str, values: Any, error: type[Exception], declared: Option) -> None:
    limits = declared.minimum, declared.maximum
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise error(f"{name} must be a list of whole numbers{_limits(*limits)}, got {values!r}")
    listed = list(values)
    if not listed or not all(_is_whole(value, *limits) for value in listed):
        raise error(f"{name} must be one or more whole numbers{_limits(*limits)}, got {listed!r}")


def _is_whole(value: Any, minimum: float | None, maximum: float | None) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def _limits(minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    return f" of at least {minimum}" if minimum is not None else "" if maximum is None else f" of at most {maximum}"


def accepts_options(
    options: Callable[Arguments, Record],
) -> Callable[[Callable[[Record], Result]], Callable[Arguments, Result]]:
    """Give a function of one record of ``options`` the fields as its arguments.

    ``{arguments}`` in its docstring becomes the list of them.
    """

    def decorate(function: Callable[[Record], Result]) -> Callable[Arguments, Result]:
        returned = inspect.signature(function).return_annotation
        signature = inspect.signature(options).replace(return_annotation=returned)

        @functools.wraps(function)
        def call(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
            try:
                signature.bind(*args, **named)
            except TypeError as error:  # it would name the record's class
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(options(*args, **named))

        vars(call)["__signature__"] = signature
        annotations = {one.name: one.annotation for one in signature.parameters.values()}
        call.__annotations__ = {**annotations, "return": returned}
        call.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("{arguments}", _arguments(options))
        return call

    return decorate


def _arguments(options: Any) -> str:
    """The fields as a docstring's list of arguments, without the first line's indentation."""
    texts = (f"{name}: {one.help} {one.details}".strip() for name, one in declared(options).items())
    wrapped = (textwrap.fill(text, 120, initial_indent="    ", subsequent_indent=" " * 8) for text in texts)
    return "\n".join(wrapped).lstrip()


def command_options(options: type) -> Iterator[CommandOption]:
    """The fields that commands offer, in order."""
    for name, one in declared(options).items():
        if one.flag is not None:
            default = defaults(options).get(name) if one.command_default is None else one.command_default
            yield CommandOption(
                name=name,
                flag=one.flag,
                help=with_default(one.help, default),
                kind=one.kind,
                minimum=one.minimum,
                maximum=one.maximum,
                choices=one.choices,
            )


def from_command(options: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a command's values: those that were given, and the command's own defaults."""
    values = {name: one.command_default for name, one in declared(options).items()}
    values |= {name: value for name, value in given.items() if name in values and value is not None}
    return {name: value for name, value in values.items() if value is not None}


def with_default(help: str, default: Any) -> str:
    """``help`` and the default, if there is one."""
    if default is None:
        return help
    shown = "on" if default is True else "off" if default is False else _typed(default)
    return f"{help} Default: {shown}."


def _typed(value: Any) -> str:
    """A value as it is typed on a command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(options: type) -> str:
    """The options as a table of Markdown: name, default, option of the command, what it does."""
    rows = ["| argument | default | command line | |", "|---|---|---|---|"]
    known = defaults(options)
    for name, one in declared(options).items():
        default = f"`{known[name]!r}`" if name in known else ""
        typed = f"`{one.flag}`" if one.flag else ""
        if one.command_default is not None:
            typed += f", default `{_typed(one.command_default)}`"
        rows.append(f"| `{name}` | {default} | {typed} | {one.help} |")
    return "\n".join(rows)
