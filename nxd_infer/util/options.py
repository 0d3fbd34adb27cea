"""Options that are declared once, as the fields of a dataclass.

::

    @dataclass
    class TraceOptions:
        tp_degree: int = option(1, "Number of ranks.", int, flag="--tp", minimum=1)

    @accepts_options(TraceOptions)
    def trace(options: TraceOptions) -> Model:
        '''Trace a model. ...{arguments}'''

    trace(tp_degree=2)

The function's signature and documentation, the options of a command (:func:`command_options`) and the table in the
documents (:func:`table`) are made from the fields, so a new option is one new field. What users index like a dictionary
is declared the same way (:class:`OptionDict`).
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar, get_args, get_type_hints

from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.suggest import did_you_mean

Arguments = ParamSpec("Arguments")
Record = TypeVar("Record")
Result = TypeVar("Result")

Check = Callable[[str, Any], Any]
"""``(name, value)`` to the value that is kept; raises a typed error for one that the option cannot have."""


@dataclass(frozen=True)
class Kind:
    """What a value must be, in words and as a test."""

    text: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


KINDS: dict[Any, Kind] = {
    bool: Kind("True or False", lambda value: isinstance(value, bool)),
    int: Kind("a whole number", _is_whole),
    float: Kind("a number", _is_finite),
    str: Kind("a text", lambda value: isinstance(value, str)),
    dict: Kind("a dictionary", lambda value: isinstance(value, Mapping)),
    Path: Kind("a path", lambda value: isinstance(value, str | os.PathLike)),
    object: Kind("a value", lambda _: True),
}
"""The kinds that have a type. An option may have a :class:`Kind` of its own."""
SEVERAL = {int: "one or more whole numbers", float: "one or more numbers", str: "names", object: "values"}


@dataclass(frozen=True)
class Option:
    """What is declared of an option besides its name and its type in Python."""

    default: Any
    """MISSING: it has none. If it is None, None is a value, too."""
    help: str
    """What it does; shown in Python, on the command line and in the documents."""
    kind: Any = object
    """A key of :data:`KINDS`, a list of one, a :class:`Kind`, or a dataclass of options: a section."""
    details: str = ""
    """Further sentences for a caller from Python."""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    check: Check | None = None
    """For what kind, limits and choices cannot express, and to keep another value than the given one."""
    secret: bool = False
    """Whether no text may show its value."""
    flag: str | None = None
    """The option of a command, ``--name`` or ``--name/--no-name``; "" is made of its name, None: commands have none."""
    repeats: bool = False
    """Whether a command takes a list as several options; else it is typed with commas."""
    group: str | None = None
    """The heading in the command's help."""

    @property
    def wanted(self) -> str:
        """What a value must be: ``a whole number from 1 to 32``."""
        inner, unit = element(self.kind), f" of {self.unit}" if self.unit else ""
        if self.choices:
            several = [f'"{choice}"' for choice in self.choices] + ["None"] * (self.default is None)
            return " or ".join(filter(None, (", ".join(several[:-1]), several[-1])))
        if inner is not None:
            what = f"a list of {SEVERAL[inner]}{unit}{self.limits}"
        else:
            what = f"{(self.kind if isinstance(self.kind, Kind) else KINDS[self.kind]).text}{unit}{self.limits}"
        return f"{what}, or None" if self.default is None else what

    @property
    def limits(self) -> str:
        """``" from 1 to 32"``; "" if there are none."""
        low, high, above, below = map(_typed, (self.minimum, self.maximum, self.above, self.below))
        if above:
            return f" above {above}" + (f", at most {high}" if high else "")
        if low and (high or below):
            return f" from {low} to {high or f'below {below}'}"
        return f" of at least {low}" if low else f" of at most {high}" if high else ""

    def fits(self, value: Any) -> bool:
        """Whether kind, limits and choices allow a value."""
        if value is None and self.default is None:
            return True
        if self.choices and (isinstance(value, str) or self.kind is str):
            return value in self.choices
        if (inner := element(self.kind)) is not None:
            if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
                return False
            each, several = replace(self, kind=inner, default=MISSING), list(value)
            return (bool(several) or inner not in (int, float)) and all(map(each.fits, several))
        kind = self.kind if isinstance(self.kind, Kind) else KINDS[self.kind]
        return kind.fits(value) and self.outside(value) is None

    def outside(self, value: Any) -> float | None:
        """The limit that a number is beyond, if it is."""
        beyond = (
            (self.minimum, lambda limit: value < limit),
            (self.maximum, lambda limit: value > limit),
            (self.above, lambda limit: value <= limit),
            (self.below, lambda limit: value >= limit),
        )
        return next((limit for limit, is_beyond in beyond if limit is not None and is_beyond(limit)), None)

    def problem(self, value: Any) -> str | None:
        """``must be a whole number from 1 to 32, got 33``; None for a value that fits."""
        if self.fits(value):
            return None
        got = "" if self.secret else f", got {value!r}"
        return f"must be {self.wanted}{got}{did_you_mean(value, self.choices) if isinstance(value, str) else ''}"

    def checked(self, name: str, value: Any, error: type[Exception]) -> Any:
        """Return the value that is kept. Raises ``error``, which calls it ``name``, or what ``check`` raises."""
        if (problem := self.problem(value)) is not None:
            raise error(f"{name} {problem}")
        return value if value is None or self.check is None else self.check(name, value)


def option(default: Any, help: str, kind: Any = object, **declared: Any) -> Any:
    """A field of a dataclass of options; ``declared`` as in :class:`Option`. ``...``: it has no default; ``kind`` None:
    its annotation's."""
    return as_field(Option(MISSING if default is ... else default, help, kind, **declared))


def option_of(options: type, name: str, **changes: Any) -> Any:
    """A field like that of another dataclass of options, but for ``changes``."""
    return as_field(replace(declared(options)[name], **changes))


def as_field(one: Option) -> Any:
    """The field of a dataclass for an option."""
    more: dict[str, Any] = {"repr": not one.secret, "metadata": {"option": one}}
    copied = isinstance(one.default, list | dict)
    return field(default_factory=one.default.copy, **more) if copied else field(default=one.default, **more)


def declared(options: type) -> dict[str, Any]:
    """What is declared of each field, by name, in order: :class:`Option`, or what is derived from it."""
    found = {one.name: one.metadata["option"] for one in fields(options)}
    return {
        name: replace(one, kind=_annotated(options)[name]) if one.kind is None else one for name, one in found.items()
    }


@functools.cache
def _annotated(options: type) -> dict[str, Any]:
    """The kinds of the fields by their annotations: ``int | None`` is a whole number."""
    hints = get_type_hints(options)
    return {name: next((one for one in get_args(hint) if hint == (one | None)), hint) for name, hint in hints.items()}


def defaults(options: type) -> dict[str, Any]:
    """The default of each field that has one."""
    return {name: one.default for name, one in declared(options).items() if one.default is not MISSING}


def is_section(kind: Any) -> bool:
    """Whether an option's kind is a dataclass of options."""
    return isinstance(kind, type) and is_dataclass(kind)


def element(kind: Any) -> Any:
    """What a list is of; None if ``kind`` is not a list's."""
    return getattr(kind, "__args__", (None,))[0]


def check_each(options: Any, error: type[Exception], where: str = "") -> None:
    """Check the value of each field by itself, unless it is the default, and keep what its check returns.

    Raises ``error``, with the names of all that are wrong after ``where``.
    """
    wrong = []
    for name, one in declared(type(options)).items():
        value = getattr(options, name)
        if value is one.default:
            continue
        try:
            object.__setattr__(options, name, one.checked(f"{where}{name}", value, error))
        except error as problem:
            wrong.append(str(problem))
    if wrong:
        raise error("; ".join(wrong))


def whole_number(
    name: str, value: Any, error: type[Exception], minimum: float | None = None, maximum: float | None = None
) -> int:
    """Return ``value``; raise ``error``, which calls it ``name``, unless it is a whole number in these limits."""
    return Option(MISSING, "", int, minimum=minimum, maximum=maximum).checked(name, value, error)


_OF_PYDANTIC = {"int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false"}


def problem_of(error: Mapping[str, Any]) -> str:
    """``"must be a whole number"`` for one of a ValidationError's errors of pydantic's; "" unless it is of a number."""
    kind = _OF_PYDANTIC.get(error["type"].partition("_")[0])
    if kind is None and "ge" in error.get("ctx", {}):
        kind = f"at least {error['ctx']['ge']:g}"
    return f"must be {kind}" if kind else ""


def from_text(kind: Any, text: str) -> Any:
    """Return a value that was typed, as in a variable; the text itself if it is not one of that kind."""
    if element(kind) is not None:
        return [from_text(element(kind), part.strip()) for part in text.split(",") if part.strip()]
    try:
        return BOOLEANS[text.strip().lower()] if kind is bool else kind(text) if kind in (int, float, Path) else text
    except (KeyError, ValueError):
        return text


BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


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
    # A command's name is one word.
    wrapper = textwrap.TextWrapper(120, initial_indent="    ", subsequent_indent=" " * 8, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, texts)).lstrip()


def command_options(options: type, *names: str) -> dict[str, Option]:
    """The fields that commands offer, or those of ``names``, then without headings; their help says the default.

    A command's value is None unless it is given, so the default stays where it is declared.
    """
    every = declared(options)
    chosen = {name: every[name] for name in names or every if every[name].flag is not None}
    changes = {"group": None} if names else {}
    return {
        name: replace(one, help=with_default(one), flag=one.flag or flag_of(name, one), **changes)
        for name, one in chosen.items()
    }


def flag_of(name: str, one: Option) -> str:
    """``--max-len`` of ``max_len``; of one that is on or off ``--access-log/--no-access-log``."""
    words = name.replace("_", "-")
    return f"--{words}/--no-{words}" if one.kind is bool else f"--{words}"


def from_command(options: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a command's values that are given, and fields of ``options``."""
    return {name: value for name, value in given.items() if name in declared(options) and value is not None}


def with_default(one: Option) -> str:
    """What an option does, with its default, if it has one."""
    if one.repeats:
        return f"{one.help} Repeat it for several."
    text = "on" if one.default is True else "off" if one.default is False else _typed(one.default)
    return f"{one.help} Default: {text}." if text else one.help


def _typed(value: Any) -> str:
    """A value as it is typed on a command line, or in a file; "" for None, and if it is empty or missing."""
    if value is MISSING or value is None or value in ([], {}):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def table(options: type, first: str, python: bool = True) -> str:
    """The options as a table of Markdown: name, default, what it does.

    ``first``: what the names are called. ``python``: whether values are written in Python, or typed.
    """

    def rows(options: type, indent: str) -> Iterator[str]:
        for name, one in declared(options).items():
            text = repr(one.default) if python and one.default is not MISSING else _typed(one.default)
            default = "" if is_section(one.kind) or not text else f"`{text}`"
            yield f"| {indent}`{name}` | {default} | {one.help} |"
            if is_section(one.kind):
                yield from rows(one.kind, f"{indent}· ")
        for reason, names in getattr(options, "UNUSED", {}).items():  # of a recipe's section
            yield f"| {indent}{', '.join(f'`{name}`' for name in names.split())} |  | no effect: {reason} |"

    return "\n".join([f"| {first} | default | |", "|---|---|---|", *rows(options, "")])


class OptionDict(dict[str, Any]):
    """A dictionary whose keys are options, made of a mapping, which is left alone, or of None::

        class InitOptions(OptionDict):
            name = "model_init_config"
            meta_device_init: bool = option(False, "build without memory", bool)

        InitOptions({"meta_device_init": 1})            # ParallelConfigError, and for a key that is not declared
        InitOptions()["meta_device_init"] == InitOptions().meta_device_init == False

    A value is checked when it is set, so what holds one need not be checked again.
    """

    name: ClassVar[str] = ""
    """What a message calls it."""
    inner: ClassVar[bool] = True
    """Whether messages call a value ``name['key']``, and not just ``key``."""
    only_given: ClassVar[bool] = False
    """Whether keys that are not given stay away."""

    def __init_subclass__(cls) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)
        for key, one in declared(cls).items():
            setattr(cls, key, property(lambda self, key=key, default=one.default: self.get(key, default)))

    def __init__(self, given: Any = None):
        super().__init__()
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise ParallelConfigError(f"{self.name} must be a dict or None, got {type(given).__name__}")
        for key in given:
            self._declared(key)
        for key, one in declared(type(self)).items():
            if key in given or not self.only_given:
                self[key] = given.get(key, one.default)

    @classmethod
    def _declared(cls, key: Any) -> Option:
        known = declared(cls)
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; known are {', '.join(known)}"
            raise ParallelConfigError(f"{cls.name} has no key {key!r}{hint}")
        return known[key]

    def __setitem__(self, key: str, value: Any) -> None:
        one = self._declared(key)
        what = f"{self.name}[{key!r}]" if self.inner else key
        if (
            one.kind is bool and isinstance(value, int) and value in (0, 1)
        ):  # scripts pass a number that their command line gave
            value = bool(value)
        value = one.kind(value) if is_section(one.kind) else one.checked(what, value, ParallelConfigError)
        self.agree({**self, key: value})
        super().__setitem__(key, value)

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raise ParallelConfigError where values fit each for itself and not together. Some may be missing yet."""

    update = MutableMapping.update  # dict's own pass __setitem__ by
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> OptionDict:
        self.update(other)
        return self
