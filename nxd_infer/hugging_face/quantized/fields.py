"""The field ``quantization_config`` of a ``config.json``, whose values pydantic checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from nxd_infer.errors import ModelConfigError

FIELD = "quantization_config"
AnyCase = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
Block = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
"""Rows and columns."""


class Fields(BaseModel):
    """What decides how weights are stored; other fields tell how the numbers were found."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


Kind = TypeVar("Kind", bound=Fields)


def checked(kind: type[Kind], given: Mapping[str, Any], origin: str, field: str = FIELD) -> Kind:
    """Read an object; null means absent. Raises ModelConfigError naming the field, its value and what can be read."""
    try:
        return kind.model_validate(_present(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (field, *first["loc"])))
        value = "" if first["type"] == "missing" else f" = {first['input']!r}"
        raise ModelConfigError(f"{origin}: {name}{value}: {first['msg']}; use the model in another form") from None


def _present(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {name: _present(value) for name, value in given.items() if value is not None}
    return given
