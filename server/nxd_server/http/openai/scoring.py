"""``POST /v1/rerank`` and ``/v1/score``, as vLLM, Cohere and Jina have them: how well two texts match.

A cross-encoder reads both texts at once, and its one label's activated logit is the score. An embedding model gives the
cosine of the vectors of both.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from nxd_server.http.error_responses import bad_request, check_fields, missing_field, unsupported, wrong
from nxd_server.http.openai.embeddings import encode_texts, listed, usage_of
from nxd_server.http.openai.schemas import MOST_TEXTS, TRUNCATE
from nxd_server.http.request_body import Neutral, QueuedBody, Whole, equals, is_empty, is_one_of
from nxd_server.http.request_context import context_of, require_task

PAIRS = {"text_1": ("text_2",), "data_1": ("data_2",), "queries": ("documents", "items")}
"""The names of the first texts of a score, and what the second may be called beside each."""


class MatchBody(QueuedBody):
    """Fields that both routes have."""

    NEUTRAL: ClassVar[Neutral] = {
        **dict.fromkeys(("max_tokens_per_doc", "max_chunks_per_doc"), equals(0)),
        "mm_processor_kwargs": is_empty,
        "rank_fields": is_one_of(["text"]),
        "truncation_direction": is_one_of("right", "Right"),
        "add_special_tokens": is_one_of(True),
    }

    truncate_prompt_tokens: Whole | None = Field(None, description=TRUNCATE)
    use_activation: bool = Field(True, description="False: a cross-encoder's scores are its logits.")


class RerankBody(MatchBody):
    """``POST /v1/rerank``, ``/rerank`` and ``/v2/rerank``."""

    query: str
    documents: list[Any] | None = Field(None, description='Texts, or objects of the form {"text": "a text"}.')
    texts: list[Any] | None = Field(None, description="TEI's name of documents; the answer then has its form.")
    raw_scores: bool = Field(False, description="With texts: scores are logits.")
    return_text: bool = Field(False, description="With texts: the results have them.")
    truncate: bool = Field(False, description="With texts: cut those that are too long.")
    top_n: Whole = Field(0, ge=0, description="Return this many of the best documents; 0: all.")
    return_documents: bool = Field(True, description="False: the results have no texts.")


class ScoreBody(MatchBody):
    """``POST /v1/score`` and ``/score``: pairs under vLLM's names, of which one of each kind is given."""

    text_1: Any = Field(None, description="A text, or a list of texts: one for all the second ones, or as many.")
    text_2: Any = Field(None, description="A text, or a list of texts.")
    data_1: Any = Field(None, description="Another name of text_1.")
    data_2: Any = Field(None, description="Another name of text_2.")
    queries: Any = Field(None, description="Another name of text_1, beside documents or items.")
    documents: Any = Field(None, description="Another name of text_2, beside queries.")
    items: Any = Field(None, description="Another name of text_2, beside queries.")


async def rerank(request: Request, body: RerankBody) -> JSONResponse:
    """Return the documents by how well they match the query, the best first."""
    service = context_of(request).service
    name = "documents" if body.texts is None else "texts"
    if getattr(body, name) is None:
        raise missing_field(name)
    documents = _texts(getattr(body, name), name)
    if not body.query:
        raise wrong("query", "must not be empty")
    others = ("documents", "top_n") if name == "texts" else ("raw_scores", "return_text", "truncate")
    if extra := next((one for one in others if getattr(body, one)), None):
        raise wrong(extra, f"is not taken beside `{name}`")
    if name == "texts":
        cut = -1 if body.truncate else body.truncate_prompt_tokens
        body = body.model_copy(update={"use_activation": not body.raw_scores, "truncate_prompt_tokens": cut})
    scores, usage = await _scores(request, body, [body.query], documents, ("query", name))
    if name == "texts":
        ranked = sorted(enumerate(scores), key=lambda one: -one[1])
        shown = [{"text": text} if body.return_text else {} for text in documents]
        return JSONResponse([{"index": place, **shown[place], "score": value} for place, value in ranked])
    results = [{"index": index, "relevance_score": score} for index, score in enumerate(scores)]
    results.sort(key=lambda result: -result["relevance_score"])
    results = results[: body.top_n or None]
    if body.return_documents:
        results = [{**result, "document": {"text": documents[result["index"]]}} for result in results]
    head = {"id": f"rerank-{uuid.uuid4().hex}", "model": service.model_name}
    return JSONResponse({**head, "usage": usage, "results": results})


async def score(request: Request, body: ScoreBody) -> JSONResponse:
    """Return how well each of the first texts, or the only one, matches its second text."""
    service = context_of(request).service
    names = first, second = _names_of(body)
    firsts, seconds = _texts(getattr(body, first), first), _texts(getattr(body, second), second)
    if len(firsts) not in (1, len(seconds)):
        raise bad_request(
            f"`{first}` has {len(firsts)} texts and `{second}` has {len(seconds)}: send one text as `{first}`, or as "
            f"many as `{second}` has",
            first,
        )
    scores, usage = await _scores(request, body, firsts, seconds, names)
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return listed(service, data, usage, "score")


def _names_of(body: ScoreBody) -> tuple[str, str]:
    """Return the names under which the first and the second texts were given."""
    given = {*PAIRS, *(name for seconds in PAIRS.values() for name in seconds)}
    given = {name for name in given if getattr(body, name) is not None}
    first = next((name for name in PAIRS if name in given), None)
    if first is None:
        raise missing_field("text_1")
    second = next((name for name in PAIRS[first] if name in given), None)
    if second is None:
        raise missing_field(PAIRS[first][0])
    if more := sorted(given - {first, second}):
        raise wrong(more[0], f"is not taken beside `{first}` and `{second}`")
    return first, second


def _texts(value: Any, field: str) -> list[str]:
    """Return a text, or the texts of a list, each a string or ``{"text": ...}``."""
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise wrong(field, "must not be an empty list")
    if len(listed) > MOST_TEXTS:
        raise wrong(field, f"has {len(listed)} texts; one request may have {MOST_TEXTS}")
    return [_text(item, f"{field}[{place}]" if listed is value else field) for place, item in enumerate(listed)]


def _text(item: Any, path: str) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise bad_request(f'`{path}` must be a text or an object {{"text": "a text"}}', path)
    if isinstance(item, dict):
        check_fields(item, ["text"], path)
    return text


async def _scores(
    request: Request, body: MatchBody, firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str]
) -> tuple[list[float], dict[str, int]]:
    """Return each pair's score, and the tokens that it took; ``names``: of the fields."""
    service = require_task(request, request.scope["path"], "classify", "embed")
    encoder = service.require_encoder()
    options = {"truncate_prompt_tokens": body.truncate_prompt_tokens}
    if encoder.task == "embed":
        if not body.use_activation:
            raise unsupported("use_activation", "an embedding model's score is a cosine, which has no activation")
        return await _cosines(request, firsts, seconds, names, options)
    if len(encoder.labels) != 1:
        raise bad_request(
            f"{service.model_name!r} is a classifier of {len(encoder.labels)} labels; a score is that of a "
            "cross-encoder, which has one: use /v1/classify",
            code="task_not_supported",
        )
    import torch

    from nxd_server.engine.text_encoder import probabilities

    pairs = [(firsts[place] if len(firsts) > 1 else firsts[0], second) for place, second in enumerate(seconds)]
    results = await encode_texts(request, pairs, lambda place: _path(names[1], place, len(pairs)), **options)
    logits = torch.cat([result.values for result in results])
    scores = "sigmoid" if encoder.scores == "regression" else encoder.scores
    activated = probabilities(logits[:, None], scores if body.use_activation else "none")
    return (logits if activated is None else activated.flatten()).tolist(), usage_of(results)


async def _cosines(
    request: Request, firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str], options: dict[str, Any]
) -> tuple[list[float], dict[str, int]]:
    import torch

    count = len(firsts)

    def path_of(place: int) -> str:
        return _path(names[0], place, count) if place < count else _path(names[1], place - count, len(seconds))

    results = await encode_texts(request, [*firsts, *seconds], path_of, **options)
    vectors = torch.stack([result.values for result in results])
    return torch.cosine_similarity(vectors[:count], vectors[count:]).tolist(), usage_of(results)


def _path(name: str, place: int, count: int) -> str:
    return f"{name}[{place}]" if count > 1 else name
