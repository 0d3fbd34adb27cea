"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from nxd_server.engine.request import check_token_ids
from nxd_server.http.body_schema import Body, Listed
from nxd_server.http.error_responses import bad_request, encode, unsupported
from nxd_server.http.openai.chat import chat_text
from nxd_server.http.openai.tools import offered_tools
from nxd_server.http.request_context import INLINE_TEXT, Context, check_model, context_of, unless_left
from nxd_server.text.field_bounds import MOST_IDS

INLINE_TOKENS = 4096


class TokenizeBody(Body):
    """``POST /tokenize``: a text, or a conversation for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    tools: Listed[dict[str, Any]] | None = Field(None, description="Functions that the template shows to the model.")
    add_special_tokens: bool | None = Field(None, description="Of a text; by default true. A template adds its own.")
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Listed[int]


async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """Return the token ids of a text, or of a conversation as the model would see it."""
    context = context_of(request)
    context.service.require_loaded()
    check_model(context.service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either `prompt` or `messages`", "prompt", "missing_parameter")
    if body.messages is not None and body.add_special_tokens:
        raise unsupported("add_special_tokens", "of a conversation, the chat template decides")
    if body.messages is None and body.tools:
        raise bad_request("`tools` need `messages`", "tools")
    if body.messages is None and len(body.prompt or "") <= INLINE_TEXT:
        answer = _tokenized(context, body, body.prompt or "")
    else:
        answer = await unless_left(request, _tokenize_aside(context, body))
    return Response(answer, media_type="application/json")


async def _tokenize_aside(context: Context, body: TokenizeBody) -> bytes:
    service = context.service
    text, special, field = body.prompt or "", _special(body), "prompt"
    if body.messages is not None:
        tools = offered_tools(body.tools or [], None, service.tool_format)
        text, special, field = await chat_text(service, body.messages, {}, tools), False, "messages"
    service.require_tokenizer().check_length(text, service.max_len, field)
    return await service.bounded_tokenizer().tokenize(
        text, special=special, strings=body.return_token_strs, max_model_len=service.max_len, field=field
    )


def _special(body: TokenizeBody) -> bool:
    return body.add_special_tokens is not False


def _tokenized(context: Context, body: TokenizeBody, text: str) -> bytes:
    service = context.service
    tokenizer = service.require_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=_special(body), field="prompt")
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token) for token in tokens]
    return encode(answer)


async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """Return the text of token ids, including special tokens."""
    service = context_of(request).service
    service.require_loaded()
    check_model(service, body.model)
    tokenizer = service.require_tokenizer()
    most = max(MOST_IDS, service.max_len)
    if len(body.tokens) > most:
        raise bad_request(f"`tokens` has {len(body.tokens)} ids; at most {most} are taken at once", "tokens")
    if body.tokens:
        check_token_ids(body.tokens, service.vocab_size, "tokens")
    if len(body.tokens) <= INLINE_TOKENS:
        answer = encode({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})
    else:
        answer = await unless_left(request, service.bounded_tokenizer().detokenize(body.tokens))
    return Response(answer, media_type="application/json")
