"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from .chat import chat_prompt
from .errors import bad_request
from .requests import check_ids, check_model, context_of, encode_text
from .schemas import DetokenizeBody, TokenizeBody


async def tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the model would see it."""
    service = context_of(request).service
    service.require_loaded()
    check_model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either `prompt` or `messages`", "prompt", "missing_parameter")
    if body.messages is not None:
        tokens = await chat_prompt(service, body.messages, {})
    else:
        tokens = await encode_text(service, body.prompt or "", "prompt", special=body.add_special_tokens)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_len, "tokens": tokens}
    if body.return_token_strs:
        tokenizer = service.require_tokenizer()
        answer["token_strs"] = [tokenizer.token_text(token) for token in tokens]
    return answer


async def detokenize(request: Request, body: DetokenizeBody) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    service = context_of(request).service
    service.require_loaded()
    check_model(service, body.model)
    check_ids(service, body.tokens, "tokens")
    if any(token < 0 or token >= 2**31 for token in body.tokens):
        raise bad_request("`tokens`: a token id is out of range", "tokens")
    return {"prompt": service.require_tokenizer().decode(body.tokens, skip_special_tokens=False)}
