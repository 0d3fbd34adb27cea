"""What an answer must be: JSON, JSON of a schema, a match of a regular expression, one of some texts, or a sentence of
a grammar."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from nxd_server.errors import RequestError

MOST_CHARACTERS = 2**16
"""Of a schema, an expression or a grammar."""
MOST_MADE = 2**18
"""Of a grammar that was made of several."""

BLANKS = {"whitespace_pattern": r"\x20|\r?\n(\x20{0,16}|\t{0,4})"}
"""Between the tokens of JSON: one space, or a new line and its indentation. A small model would spend its tokens on
more."""
NO_BLANKS = {"whitespace_flexible": False}


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on an answer. Exactly one of the first five fields is given; names and meaning as in vLLM.

    Raises RequestError naming :attr:`where` for none, several, or a value of another type. Whether a schema, an
    expression or a grammar is valid is checked when it is compiled (:class:`~nxd_server.text.grammars.Grammars`).
    """

    json: Mapping[str, Any] | str | None = None
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """The whole answer matches it. In the syntax of Rust's ``regex``: without look-around and back references."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation or in llama.cpp's (GBNF)."""
    disable_any_whitespace: bool = False
    """True: JSON without whitespace between its tokens. Else one space, or a new line and its indentation."""
    where: str = field(default="structured_outputs", compare=False)
    """The request's field that this was made of, for errors."""
    made: bool = field(default=False, compare=False)
    """Whether it was made of several, each within the limit."""

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(self.where, f"needs exactly one of {', '.join(FORMS)}; {found}")
        if not isinstance(self.disable_any_whitespace, bool):
            raise self.error(COMPACT, f"is a switch, true or false, not {self.disable_any_whitespace!r}")
        value = getattr(self, given[0])
        if given[0] == "json_object" and value is not True:
            raise self.error("json_object", f"must be true, got {value!r}")
        if given[0] == "json":
            _ = self.schema
        if given[0] in ("regex", "grammar") and not isinstance(value, str):
            raise self.error(given[0], "must be a string")
        if given[0] == "choice" and not (_texts(value) and value):
            raise self.error("choice", "must be a list of one or more strings")
        most = MOST_MADE if self.made else MOST_CHARACTERS
        if len(self.text) > most:
            raise self.error(given[0], f"has {len(self.text)} characters; at most {most} are taken")

    @classmethod
    def of(cls, value: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """Return ``value``, or the constraint with its entries as fields. Raises RequestError for another field."""
        if isinstance(value, StructuredOutputs):
            return value
        where = "structured_outputs"
        if not isinstance(value, Mapping):
            raise RequestError(where, f"must be an object with one of {', '.join(FORMS)}, got {value!r}")
        for name in value:
            if name not in (*FORMS, COMPACT):
                raise RequestError(where, f"takes one of {', '.join(FORMS)}; got {str(name)[:100]!r}")
        return cls(**value)

    @property
    def form(self) -> str:
        """The name of the field that is given."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @functools.cached_property
    def text(self) -> str:
        """The constraint as one text; with :attr:`form` it says all."""
        value = getattr(self, self.form)
        if self.form == "json_object":
            return '{"type":"object"}'
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of an answer in JSON. Raises RequestError if its text is not an object."""
        try:
            found = json.loads(self.text)
        except (ValueError, TypeError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self.error(self.form, "must be a JSON schema: an object, or its text")
        return found

    @property
    def rule(self) -> str:
        """The right side of a rule in a grammar that stands for JSON of :attr:`schema`."""
        return json_rule(self.schema, self.disable_any_whitespace)

    def error(self, name: str, problem: str) -> RequestError:
        """Return the error of the field ``name``."""
        whole = self.where != "structured_outputs"
        return RequestError(self.where if whole else f"{self.where}.{name}", problem)


def json_rule(schema: Mapping[str, Any], compact: bool = False) -> str:
    """Return the right side of a rule in a grammar that stands for JSON of ``schema``; ``compact``: without blanks."""
    return "%json " + json.dumps({**schema, "x-guidance": NO_BLANKS if compact else BLANKS})


COMPACT = "disable_any_whitespace"
FORMS = tuple(one.name for one in fields(StructuredOutputs) if one.name not in (COMPACT, "where", "made"))


def _texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)
