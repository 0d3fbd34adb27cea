"""``POST /v1/embeddings`` and ``POST /v1/classify``: texts through an encoder."""

from __future__ import annotations

import asyncio
import base64
import functools
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse

from nxd_server.errors import QueueFullError, RateLimitError, not_finished
from nxd_server.http.error_responses import unsupported, wrong
from nxd_server.http.openai.schemas import ClassifyBody, EmbeddingBody, texts_or_pairs, token_lists
from nxd_server.http.request_context import (
    INLINE_TEXT,
    Context,
    context_of,
    on_a_copy,
    require_task,
    seconds_left,
    unless_left,
    wait_all,
    whole_of,
)

if TYPE_CHECKING:
    import torch

    from nxd_server.app.replica import Replica
    from nxd_server.app.service import Service
    from nxd_server.engine.text_encoder import Encoded, TextEncoder, Tokens

Text = str | tuple[str, str] | list[int]
LARGEST_WAVE = 64
RETRY_SECONDS = 0.05


async def embeddings(request: Request, body: EmbeddingBody) -> JSONResponse:
    """Return one vector per text, in the order of the texts."""
    service = require_task(request, "/v1/embeddings", "embed")
    results, vectors = await embed(request, body)
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return listed(service, data, usage_of(results))


async def classify(request: Request, body: ClassifyBody) -> JSONResponse:
    """Return each text's most likely label and all probabilities, or the raw scores if there are none; of a token
    classifier the entities in each text."""
    service = require_task(request, "/v1/classify", "classify", "token-classification")
    if service.task == "token-classification":
        return await _entities(request, body)
    if body.aggregation_strategy is not None:
        raise unsupported("aggregation_strategy", "of a model that classifies whole texts")
    results = await encode_input(request, body.input, truncate_prompt_tokens=body.truncate_prompt_tokens)
    encoder = service.require_encoder()
    scores = encoder.scores if body.use_activation else "none"
    data = [
        {"index": index, **verdict_on(result.values, encoder.labels, scores)} for index, result in enumerate(results)
    ]
    return listed(service, data, usage_of(results), "classify")


async def _entities(request: Request, body: ClassifyBody) -> JSONResponse:
    from nxd_server.engine.entities import entities_in

    service = context_of(request).service
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise wrong("input", "of a token classifier must be a text or a list of texts")
    if body.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "of a token classifier: what is cut off has no labels")
    if not body.use_activation:
        raise unsupported("use_activation", "of a token classifier's entities; /pooling gives the logits")
    results = await encode_input(request, texts)
    encoder, strategy = service.require_encoder(), body.aggregation_strategy or "simple"

    def entities() -> list[dict[str, Any]]:
        pairs = enumerate(zip(texts, results, strict=True))
        return [
            {"index": i, "entities": entities_in(text, found.values, encoder.labels, encoder.tokenizer, strategy)}
            for i, (text, found) in pairs
        ]

    return listed(service, await asyncio.to_thread(entities), usage_of(results))


def listed(service: Service, data: list[dict[str, Any]], usage: dict[str, int], kind: str = "") -> JSONResponse:
    """Return an answer that is a list; ``kind``: what its id begins with, if it has one."""
    head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time())} if kind else {}
    return JSONResponse({**head, "object": "list", "model": service.model_name, "data": data, "usage": usage})


def verdict_on(logits: torch.Tensor, labels: Sequence[str], scores: str) -> dict[str, Any]:
    """Return the answer for one text's ``logits`` [labels]."""
    from nxd_server.engine import text_encoder  # slow: torch, which a server that generates never loads

    probs = text_encoder.probabilities(logits, scores)
    numbers = {"scores": logits.tolist()} if probs is None else {"probs": probs.tolist()}
    return {"label": text_encoder.likeliest(logits, labels), **numbers, "num_classes": logits.numel()}


async def encode_input(request: Request, value: Any, **options: Any) -> list[Encoded]:
    """Return the result of every text in a body's ``input``."""
    encoder = context_of(request).service.require_encoder()
    texts = texts_or_pairs(value, "input") if encoder.task == "classify" else token_lists(value, "input")
    several = len(texts) > 1
    return await encode_texts(request, texts, lambda place: f"input[{place}]" if several else "input", **options)


async def encode_texts(
    request: Request, texts: Sequence[Text], path_of: Callable[[int], str], **options: Any
) -> list[Encoded]:
    """Return every text's result; ``path_of`` names a text by its index, and ``options`` are those of
    :func:`tokens_of`. Long lists go in waves, so that they leave room for other requests."""
    context_of(request).service.require_encoder()

    return await on_a_copy(request, lambda replica: _encode(request, replica, texts, path_of, **options))


async def _encode(
    request: Request, replica: Replica, texts: Sequence[Text], path_of: Callable[[int], str], **options: Any
) -> list[Encoded]:
    context, encoder = context_of(request), cast("TextEncoder", replica.encoder)
    settings = context.settings
    for place, text in enumerate(texts):
        path = path_of(place)
        if not text:
            raise wrong(path, "must not be empty")
        for part in _parts(text):
            encoder.tokenizer.check_length(part, encoder.max_len, path)
    deadline = time.monotonic() + seconds_left(request)
    queued = settings.max_queued_requests
    wave = max(1, encoder.engine.queue.capacity, LARGEST_WAVE if queued is None else min(LARGEST_WAVE, queued // 2))
    results: list[Encoded] = []
    whole = whole_of(request)
    tokens: list[Tokens] = []

    def path_now(place: int) -> str:
        return path_of(len(results) + place)

    while len(results) < len(texts):
        left = deadline - time.monotonic()
        if left <= 0:  # checked here, because a running step is not stopped at the deadline
            raise not_finished(settings.request_timeout)
        try:
            if not tokens:
                now = texts[len(results) : len(results) + wave]
                tokens = await unless_left(request, tokens_of(context, encoder, now, path_now, **options), left)
            more = {"timeout": left, "continuing": bool(results), "whole": whole}
            submits = [
                functools.partial(encoder.submit, one, field=path_now(place), **more)
                for place, one in enumerate(tokens)
            ]
            count = sum(len(ids) for ids, _ in tokens)
            encoder.engine.check_room(len(submits), count, whole=whole, timeout=left, continuing=bool(results))
            results += await wait_all(request, submits, timeout=left)
            tokens = []
        except RateLimitError:
            raise
        except QueueFullError:
            if not results or time.monotonic() >= deadline:
                raise
            # Partly done: wait for room instead of losing the work.
            await unless_left(request, asyncio.sleep(RETRY_SECONDS))
    whole.close()  # so that a slow reader of the answer delays no weight swap
    return results


async def tokens_of(
    context: Context,
    encoder: TextEncoder,
    texts: Sequence[Text],
    path_of: Callable[[int], str],
    *,
    prompt_name: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> list[Tokens]:
    """Tokenize each text: inline if all are short together, else in a thread.

    ``path_of`` names a text by its index in ``texts``. After a cancellation no further text is begun.
    """
    left = threading.Event()

    def encode() -> list[Tokens]:
        options: dict[str, Any] = {"prompt_name": prompt_name, "truncate_prompt_tokens": truncate_prompt_tokens}
        several = enumerate(texts)
        return [encoder.tokens(text, field=path_of(place), **options) for place, text in several if not left.is_set()]

    characters = sum(len(part) for text in texts for part in _parts(text))
    return encode() if characters <= INLINE_TEXT else await context.encoders.run(encode, left.set)


def _parts(text: Text) -> Sequence[str]:
    return (text,) if isinstance(text, str) else text if isinstance(text, tuple) else ()


async def embed(request: Request, body: EmbeddingBody) -> tuple[list[Encoded], list[torch.Tensor]]:
    """Return every text's result, and its vector with as many dimensions as ``body`` asks for."""
    service = context_of(request).service
    size = _dimensions(service, body.dimensions)
    results = await encode_input(
        request, body.input, prompt_name=body.prompt_name, truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    vectors = [result.values[:size] for result in results]
    if size is not None and service.metadata.get("normalize"):
        vectors = [vector / vector.norm().clamp(min=1e-12) for vector in vectors]
    return results, vectors


def _dimensions(service: Service, asked: int | None) -> int | None:
    """Return the number of dimensions to which vectors are cut, None for all. Raises ApiError 400."""
    outputs = (spec for bucket in service.manifest.buckets for spec in bucket.outputs)
    size = next((spec.shape[-1] for spec in outputs if spec.name == "embedding"), 0)
    if asked is None or asked == size:
        return None
    allowed = service.metadata.get("matryoshka")
    if not allowed:
        why = f"this model's embeddings have {size}, and its config.json has no `is_matryoshka` or "
        raise unsupported("dimensions", f"{why}`matryoshka_dimensions`, so fewer would mean little; got {asked}")
    if not 1 <= asked <= size or (allowed is not True and asked not in allowed):
        known = f"from 1 to {size}" if allowed is True else f"one of {', '.join(map(str, allowed))}, or {size}"
        raise wrong("dimensions", f"must be {known} for this model, got {asked}")
    return asked


def encoded(values: torch.Tensor, form: str) -> list[Any] | str:
    """Return numbers as lists, or as the base64 of float32 in their order."""
    if form == "float":
        return values.tolist()
    return base64.b64encode(values.float().numpy().astype("<f4").tobytes()).decode("ascii")


def usage_of(results: list[Encoded]) -> dict[str, int]:
    tokens = sum(result.tokens for result in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
