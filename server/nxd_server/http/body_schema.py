"""The schema of request bodies: which fields each route accepts, and the conversion to a checked object.

A field is of one of four kinds. *Acting* fields are declared on the model and change the answer as documented.
*Harmless* ones (``user``, ``metadata``, ...) are for bookkeeping and accepted with any value. *Neutral* ones are not
implemented, so only values that have no effect are accepted (``best_of`` 1, ``suffix`` null); another value is a 400
that names the field. All other fields are unknown: a 400 that names them. ``null`` always means "not given".

Ranges are checked once, where they are used: :class:`~nxd_server.engine.sampling_params.SamplingParams` for sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from nxd_infer.util.options import problem_of
from nxd_server.http.error_responses import bad_request, clip, missing_field, unknown_field, unsupported

BodyT = TypeVar("BodyT", bound="Body")
ItemT = TypeVar("ItemT")
Listed = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list whose validation stops at its first error: reporting each takes seconds and hundreds of megabytes."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which JSON may write as 2.0."""


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("texts", "must be a string or a list of strings")


Texts = Annotated[Listed[str], BeforeValidator(_texts, json_schema_input_type=str | list[str])]
"""One text or a list of them. A union would put the name of its branch into the path of an error."""


class Body(BaseModel):
    """Base of all request bodies: strict types, unknown fields rejected."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"user", "metadata", "safety_identifier", "request_id"})
    NEUTRAL: ClassVar[dict[str, Callable[[Any], bool]]] = {}
    INSTEAD: ClassVar[dict[str, str]] = {}
    """Maps names used by other servers to ours."""

    @classmethod
    def parse(cls: type[BodyT], data: dict[str, Any]) -> BodyT:
        """Return ``data`` as this body.

        Raises:
            ApiError: 400; its ``param`` is the path of the first wrong field.
        """
        given = {}
        for name, value in data.items():
            if value is None or name in cls.HARMLESS:
                continue
            if name in cls.NEUTRAL:
                if not cls.NEUTRAL[name](value):
                    instead = cls.INSTEAD.get(name)
                    raise unsupported(name, f"use `{instead}`" if instead else "")
                continue
            if name not in cls.model_fields:
                raise unknown_field(clip(name), cls.model_fields)
            given[name] = value
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            path = field_path(first["loc"])
            if first["type"] == "missing":
                raise missing_field(path) from None
            if first["type"] == "extra_forbidden":
                raise unknown_field(path) from None
            problem = problem_of(first)
            what = f"`{path}` {problem}" if problem else f"`{path}`: {first['msg']}"
            raise bad_request(f"{what}{_got(first)}", param=path) from None


def _got(error: ErrorDetails) -> str:
    """Return the value that was given for a number, if short. For other types it might be half a prompt."""
    value = error["input"]
    if not error["type"].startswith(("int", "float", "bool")) or not isinstance(value, (int, float, str)):
        return ""
    return f", got {value!r}" if len(str(value)) <= 40 else ""


def field_path(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` -> ``messages[0].role``."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return clip(path)


def is_one_of(*values: Any) -> Callable[[Any], bool]:
    """Return a check that accepts exactly these values (``True`` is not 1 here)."""
    return lambda value: any(value == allowed and type(value) is type(allowed) for allowed in values)


def is_empty(value: Any) -> bool:
    return value in ([], {}, "")


def equals(number: float) -> Callable[[Any], bool]:
    return lambda value: value == number and not isinstance(value, bool)
