"""Request bodies: read within limits, for each body and for all together, while they arrive; and checked by a schema.

A field is of one of four kinds. *Acting* fields are declared on the model and change the answer as documented.
*Harmless* ones (``user``, ``metadata``, ...) are for bookkeeping and accepted with any value. *Neutral* ones are not
implemented, so only values that have no effect are accepted (``watermark`` false); another value is a 400 that names
the field. All other fields are unknown: those that ask for nothing (null, false, empty) are named in a response header,
and others are a 400 that names them. ``null`` always means "not given".

Ranges are checked once, where they are used: :class:`~nxd_server.engine.sampling_params.SamplingParams` for sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from nxd_infer.util.options import problem_of
from nxd_server.errors import BodyError
from nxd_server.http.error_responses import ApiError, bad_request, clip, missing_field, unknown_field, unsupported
from nxd_server.http.scope_keys import BODY_BYTES

if TYPE_CHECKING:
    from nxd_server.app.service import Service

ALL_BODIES_BYTES = 256 * 2**20
"""Limit of the bodies of all requests that are being answered, together."""
SMALL_BYTES = 64 * 1024
"""Smaller bodies are read whatever the others hold."""
PLAIN = {b"", b"identity"}
"""Accepted content encodings."""
NO_JSON = ("text/plain", "multipart/form-data")
"""Refused content types, which a page of another origin may send without asking. The third one, of forms, is curl's."""
MOST_VARIABLES = 64
DRAIN_BYTES = 16 * 2**20
DRAIN_SECONDS = 2.0
SMALLEST_LIMIT, LARGEST_LIMIT = 2 * 2**20, 16 * 2**20
TOKEN_BYTES = 6
"""An id with its comma, or the text of a token."""

MOST_CONTAINERS = 2**18
"""Most brackets and braces, in texts too: lists and objects are slow to parse, which stops everything else. For four
million, the most that a body has room for, more than a second."""


class ClientLeft(Exception):
    """The connection closed before the answer was complete, so there is nobody to answer."""


def default_limit(service: Service) -> int:
    """Return the size of the largest useful body: the most prompts of a request at their maximum length."""
    if service.task != "generate":
        return LARGEST_LIMIT
    return min(LARGEST_LIMIT, max(SMALLEST_LIMIT, TOKEN_BYTES * service.max_len * service.settings.max_choices))


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes, the limit of this server (max_body_bytes)")


def parse_json(data: bytes) -> dict[str, Any]:
    """``data`` as a JSON object.

    Raises BodyError if the text is empty, not UTF-8, not JSON (``NaN``, lone surrogates and more than 200 levels are
    not), not an object, or too complex.
    """
    if not data or data.isspace():
        raise _invalid("is empty; a JSON object is expected")
    if data.count(b"[") + data.count(b"{") > MOST_CONTAINERS:
        raise BodyError(
            f"the request body holds more than {MOST_CONTAINERS} lists and objects, which are not read; send less at "
            "once, or tensors as `safetensors`",
            "body_too_complex",
        )
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise _invalid(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
        raise _invalid(f"must be a JSON object, not {kind}")
    return value


def _invalid(what: str) -> BodyError:
    return BodyError(f"the request body {what}", "invalid_json")


class Bodies:
    """The bodies of the requests that are being answered, and how many bytes they have; ``most``: together."""

    def __init__(self, most: int = ALL_BODIES_BYTES):
        self._most = most
        self.held = 0

    async def read_json(self, request: Request, limit: int, timeout: float, silence: float) -> dict[str, Any]:
        """Return the body as a JSON object.

        Raises:
            ApiError: 413 too large; 415 compressed, or no JSON; 504 not complete within ``timeout`` seconds, or nothing
                of it came for ``silence`` seconds; 503 if it does not fit beside the others.
            ClientLeft: the connection closed before the end of the body.
            BodyError: as :func:`parse_json`.
        """
        for name, value in request.headers.raw:  # the header may occur several times
            if name == b"content-encoding" and not set(value.lower().translate(None, b" \t").split(b",")) <= PLAIN:
                raise ApiError(
                    415, f"the request body is compressed ({value[:40].decode('latin-1')!r}); send it as it is"
                )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in NO_JSON:
            what = f"the request body is {kind}, not JSON: send `Content-Type: application/json`"
            raise ApiError(415, what, code="not_json")
        declared = request.headers.get("content-length", "")  # not of a chunked body
        if declared.isascii() and declared.isdigit() and int(declared) > limit:
            raise too_large(limit)
        try:
            data = await asyncio.wait_for(self._read(request, limit, silence), timeout)
        except asyncio.TimeoutError:
            raise _late(f"was not complete after {timeout:g} s (request_timeout)") from None
        return parse_json(data)

    async def _read(self, request: Request, limit: int, silence: float) -> bytes:
        body, more = bytearray(), True
        try:
            while more:
                try:
                    message = await asyncio.wait_for(request.receive(), silence)
                except asyncio.TimeoutError:
                    raise _late(f"went silent for {silence:g} s (connection_timeout)") from None
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunk, more = message.get("body", b""), message.get("more_body", False)
                body += chunk
                self.held += len(chunk)
                if len(body) > limit:
                    raise too_large(limit)
                if self.held > self._most and len(body) > SMALL_BYTES:
                    raise ApiError(503, "too many large requests are arriving at once", code="busy", retry_after=1)
        except BaseException:
            self.held -= len(body)
            raise
        request.scope[BODY_BYTES] = len(body)
        return bytes(body)

    def let_go(self, scope: Scope) -> None:
        """Record that the request is over."""
        self.held -= scope.pop(BODY_BYTES, 0)


def _late(how: str) -> ApiError:
    return ApiError(504, f"the request body {how}", headers={"connection": "close"})


async def client_left(receive: Receive) -> None:
    """Return when the connection is closed; call after the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


class DrainingReceive:
    """A ``receive`` that tracks whether the body was read to its end, and can read the rest.

    A client that writes everything before it reads would have its connection reset and never see an early error,
    so the error waits briefly for the rest. A client that waits for permission (``Expect: 100-continue``) has sent
    nothing yet and is answered at once.
    """

    def __init__(self, receive: Receive, scope: Scope):
        self._receive = receive
        headers = dict(scope["headers"])
        # Whether the client may still be sending its request.
        self.body_left = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self._started = b"expect" not in headers

    async def __call__(self) -> Message:
        self._started = True
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.body_left = False
        return message

    async def drain(self) -> None:
        """Read the rest of the body, at most :data:`DRAIN_BYTES` of it for :data:`DRAIN_SECONDS`.

        If :attr:`body_left` is still set, the connection is closed after the answer, and no more of it is read.
        """
        if self.body_left and self._started:
            try:
                await asyncio.wait_for(self._discard(), DRAIN_SECONDS)
            except asyncio.TimeoutError:
                return

    async def _discard(self) -> None:
        size = 0
        while self.body_left and size <= DRAIN_BYTES:
            message = await self()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            size += len(message.get("body", b""))


# --- what a body may hold ---

BodyT = TypeVar("BodyT", bound="Fields")
ItemT = TypeVar("ItemT")
Listed = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list whose validation stops at its first error: reporting each takes seconds and hundreds of megabytes."""


Whole = Annotated[int, BeforeValidator(lambda one: int(one) if isinstance(one, float) and one.is_integer() else one)]
"""A whole number, which JSON may write as 2.0."""


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("texts", "must be a string or a list of strings")


Texts = Annotated[Listed[str], BeforeValidator(_texts, json_schema_input_type=str | list[str])]
"""One text or a list of them. A union would put the name of its branch into the path of an error."""


Neutral = dict[str, Callable[[Any], bool]]
"""Which values of a field have no effect."""


class Fields(BaseModel):
    """Base of request bodies, and of an object in one: strict types, unknown fields rejected."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"user", "metadata", "safety_identifier", "request_id"})
    NEUTRAL: ClassVar[Neutral] = {}
    INSTEAD: ClassVar[dict[str, str]] = {}
    """Maps names used by other servers to ours."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Unknown fields that ask for nothing."""
        return self._ignored

    @classmethod
    def parse(cls: type[BodyT], data: dict[str, Any]) -> BodyT:
        """Return ``data`` as this body.

        Raises:
            ApiError: 400; its ``param`` is the path of the first wrong field.
        """
        given, ignored = {}, []
        for name, value in data.items():
            known = name in cls.NEUTRAL or name in cls.model_fields
            if name in cls.HARMLESS or (value is None and known):
                continue
            if name in cls.NEUTRAL:
                if not cls.NEUTRAL[name](value):
                    instead = cls.INSTEAD.get(name)
                    raise unsupported(name, f"use `{instead}`" if instead else "")
                continue
            if known:
                given[name] = value
            elif value is None or value is False or is_empty(value):
                ignored.append(name)
            else:
                raise unknown_field(clip(name), cls.model_fields)
        try:
            body = cls.model_validate(given)
            body._ignored = ignored
            return body
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


class Body(Fields):
    """Base of all request bodies."""

    model: str | None = Field(None, description="A model's name, or an adapter's; a server of one model needs none.")

    @property
    def asks_for(self) -> str | None:
        """The model, or the adapter, that is to answer."""
        return self.model


class QueuedBody(Body):
    """Of a request that waits for its turn."""

    priority: Whole = Field(0, ge=-(2**31), lt=2**31, description="Of the key's own requests the lowest begins first.")


class Templated(Body):
    """Of a conversation, which the model's chat template renders."""

    tools: Listed[dict[str, Any]] = Field([], description="Functions that the model may call.")
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MOST_VARIABLES, description="The template's variables.")


class Conversational(Templated):
    """Of one that may end with a message to be continued."""

    add_generation_prompt: bool | None = Field(None, description="False: the prompt begins no message of the model.")
    continue_final_message: bool = Field(False, description="Go on with the last message instead of a new one.")
    documents: Listed[dict[str, Any]] = Field([], max_length=MOST_VARIABLES, description="Texts for the template.")


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
