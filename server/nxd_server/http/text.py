"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nxd_server.engine.request import check_token_ids

from .chat import chat_prompt
from .errors import bad_request, encode
from .requests import check_model, context_of, encode_text
from .schemas import DetokenizeBody, TokenizeBody

INLINE_TOKENS = 4096


async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """Token ids of a text, or of a conversation as the model would see it."""
    service = context_of(request).service
    service.require_loaded()
    check_model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either `prompt` or `messages`", "prompt", "missing_parameter")
    if body.messages is not None:
        tokens = await chat_prompt(service, body.messages, {}, bounded=False)
    else:
        tokens = await encode_text(service, body.prompt or "", "prompt", special=body.add_special_tokens, bounded=False)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_len, "tokens": tokens}
    tokenizer = service.require_tokenizer()

    def answered() -> bytes:
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token) for token in tokens]
        return encode(answer)

    return Response(await _inline_or_thread(answered, len(tokens)), media_type="application/json")


async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """The text of token ids, special tokens included."""
    service = context_of(request).service
    service.require_loaded()
    check_model(service, body.model)
    tokenizer = service.require_tokenizer()

    def answered() -> bytes:
        if body.tokens:
            check_token_ids(body.tokens, service.vocab_size, "tokens")
        return encode({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return Response(await _inline_or_thread(answered, len(body.tokens)), media_type="application/json")


async def _inline_or_thread(work: Callable[[], bytes], tokens: int) -> bytes:
    """``work()``, in a thread where so many tokens would hold up everybody's streams."""
    return work() if tokens <= INLINE_TOKENS else await asyncio.to_thread(work)
