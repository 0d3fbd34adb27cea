"""``POST /invocations``: SageMaker's one route; the fields of the body select the route of ours."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from nxd_server.http.error_responses import bad_request
from nxd_server.http.openai.chat import chat
from nxd_server.http.openai.completions import completions
from nxd_server.http.openai.embeddings import classify, embeddings
from nxd_server.http.openai.schemas import ChatBody, ClassifyBody, CompletionBody, EmbeddingBody
from nxd_server.http.predict import PredictBody, predict
from nxd_server.http.request_context import context_of, json_body


async def invocations(request: Request) -> Any:
    """Chat (``messages``), completion (``prompt``), embedding or classification (``input``) or tensors (``inputs``)."""
    context = context_of(request)
    context.service.require_ready()
    data = await json_body(request)
    if data.get("messages") is not None:
        return await chat(request, ChatBody.parse(data))
    if data.get("prompt") is not None:
        return await completions(request, CompletionBody.parse(data))
    if data.get("input") is not None:
        if context.service.task == "classify":
            return await classify(request, ClassifyBody.parse(data))
        return await embeddings(request, EmbeddingBody.parse(data))
    if data.get("inputs") is not None or data.get("safetensors") is not None:
        return await predict(request, PredictBody.parse(data))
    raise bad_request(
        "the body holds none of `messages`, `prompt`, `input`, `inputs` and `safetensors`; for this model send "
        + {"generate": "`prompt` or `messages`", "embed": "`input`", "classify": "`input`"}.get(
            context.service.task, "`inputs`"
        ),
        code="missing_parameter",
    )
