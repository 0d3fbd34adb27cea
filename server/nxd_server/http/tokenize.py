"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from nxd_server.engine.request import check_token_ids
from nxd_server.http.error_responses import bad_request, unsupported, wrong
from nxd_server.http.openai.chat import chat_text
from nxd_server.http.openai.schemas import MOST_MESSAGES
from nxd_server.http.openai.tools import offered_tools
from nxd_server.http.request_body import Body, Conversational, Listed
from nxd_server.http.request_context import INLINE_TEXT, Context, context_of, unless_left

INLINE_TOKENS = 4096
MOST_IDS = 2**16
"""Token ids for ``/detokenize``, unless the model's maximum length is larger."""


class TokenizeBody(Conversational):
    """``POST /tokenize``: a text, or a conversation for the chat template."""

    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = Field(None, max_length=MOST_MESSAGES)
    add_special_tokens: bool | None = Field(None, description="Of a text; by default true. A template adds its own.")
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    tokens: Listed[int]


async def tokenize(request: Request, body: TokenizeBody) -> JSONResponse:
    """Return the token ids of a text, or of a conversation as the model would see it."""
    context = context_of(request)
    context.service.require_loaded()
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either `prompt` or `messages`", "prompt", "missing_parameter")
    if body.messages is not None and body.add_special_tokens:
        raise unsupported("add_special_tokens", "of a conversation, the chat template decides")
    for name in ("tools", "documents", "chat_template_kwargs", "continue_final_message"):
        if body.messages is None and getattr(body, name):
            raise wrong(name, "need `messages`")
    return await unless_left(request, _answer(context, body))


async def _answer(context: Context, body: TokenizeBody) -> JSONResponse:
    service = context.service
    text, special, field = body.prompt or "", body.add_special_tokens is not False, "prompt"
    if body.messages is not None:
        tools = offered_tools(body.tools, None, service.tool_format)
        text = await chat_text(service, body, body.messages, body.chat_template_kwargs, tools)
        special, field = False, "messages"
    tokenizer = service.require_tokenizer()
    tokenizer.check_length(text, service.max_len, field)

    def work() -> JSONResponse:
        tokens = tokenizer.encode(text, add_special_tokens=special, field=field)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token) for token in tokens]
        return JSONResponse(answer)

    return work() if len(text) <= INLINE_TEXT else await context.encoders.run(work)


async def detokenize(request: Request, body: DetokenizeBody) -> JSONResponse:
    """Return the text of token ids, including special tokens."""
    context = context_of(request)
    service = context.service
    service.require_loaded()
    tokenizer = service.require_tokenizer()
    most = max(MOST_IDS, service.max_len)
    if len(body.tokens) > most:
        raise wrong("tokens", f"has {len(body.tokens)} ids; at most {most} are taken at once")
    if body.tokens:
        check_token_ids(body.tokens, service.vocab_size, "tokens")
    decode = functools.partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    few = len(body.tokens) <= INLINE_TOKENS
    text = decode() if few else await unless_left(request, context.encoders.run(decode))
    return JSONResponse({"prompt": text})
