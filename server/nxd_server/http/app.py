"""The application: routes over models. It runs no graph; its only work is tokenizing and bookkeeping."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from nxd_infer.util.version import VERSION
from nxd_server.http import admin, anthropic, tgi, tokenize
from nxd_server.http.error_responses import STATUSES, ApiError, bad_request
from nxd_server.http.openai import models, responses
from nxd_server.http.openai.chat import chat
from nxd_server.http.openai.completions import completions
from nxd_server.http.openai.embeddings import classify, embeddings
from nxd_server.http.openai.pooling import pooling
from nxd_server.http.openai.schemas import ChatBody, ClassifyBody, CompletionBody, EmbeddingBody, PoolingBody
from nxd_server.http.openai.scoring import RerankBody, ScoreBody, rerank, score
from nxd_server.http.openapi import about, document
from nxd_server.http.ops import health
from nxd_server.http.page.files import add_page
from nxd_server.http.predict import PredictBody, predict
from nxd_server.http.request_body import Body
from nxd_server.http.request_context import (
    Context,
    RequestMiddleware,
    answered,
    choose_model,
    context_of,
    endpoint,
    json_body,
)

if TYPE_CHECKING:
    from nxd_server.app.models import Models
    from nxd_server.settings import ServerSettings


def create_app(served: Models, settings: ServerSettings) -> FastAPI:
    """Return the app with all routes; ``app.state.context`` holds its parts."""
    app = FastAPI(
        title="nxd_infer",
        version=VERSION,
        docs_url=None,  # FastAPI's page would load scripts from another site
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    context = app.state.context = Context(served, settings)
    app.state.bodies = []
    app.add_middleware(RequestMiddleware, context=context)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-ignored-fields", "x-request-id", "x-weight-version"],
        )
    app.add_exception_handler(HTTPException, _http_exception)

    _post(app, "/v1/completions", CompletionBody, completions, "Completion", "Completion")
    _post(app, "/v1/chat/completions", ChatBody, chat, "ChatCompletion", "ChatChunk")
    _post(app, "/v1/responses", responses.ResponsesBody, responses.responses, "ResponseObject", "ResponseEvent")
    _get(app, "/v1/responses/{response_id}", responses.get_response, "ResponseObject")
    _get(app, "/v1/responses/{response_id}/input_items", responses.list_input_items, "ResponseItems")
    _route(app, "DELETE", "/v1/responses/{response_id}", responses.delete_response, about("Deleted"))
    _post(app, "/v1/messages", anthropic.MessagesBody, anthropic.messages, "Message", "MessageEvent")
    _post(app, "/v1/messages/count_tokens", anthropic.CountBody, anthropic.count_tokens, "MessageTokens")
    _post(app, "/v1/embeddings", EmbeddingBody, embeddings, "Embeddings")
    for path in ("/v1/classify", "/classify"):
        _post(app, path, ClassifyBody, classify, "Classes")
    for path in ("/v1/pooling", "/pooling"):
        _post(app, path, PoolingBody, pooling, "Pooled")
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        _post(app, path, RerankBody, rerank, "Ranking|[RankedText]")
    for path in ("/v1/score", "/score"):
        _post(app, path, ScoreBody, score, "Scores")
    _post(app, "/v1/predict", PredictBody, predict, "Prediction")
    _post(app, "/tokenize", tokenize.TokenizeBody, tokenize.tokenize, "TokenIds", ready=False)
    _post(app, "/detokenize", tokenize.DetokenizeBody, tokenize.detokenize, "Detokenized", ready=False)
    for path in ("/", "/generate", "/generate_stream"):
        _post(app, path, tgi.TgiBody, tgi.generate, "Generated|[Generated]", "GeneratedToken")
    _get(app, "/info", tgi.info, "Info")
    answers = "Completion|ChatCompletion|Embeddings|Classes|Prediction"
    told = about(answers, "Completion|ChatChunk", "ChatBody|CompletionBody|EmbeddingBody|ClassifyBody|PredictBody")
    _route(app, "POST", "/invocations", invocations, told)

    _post(app, "/v1/weights", admin.WeightsBody, admin.weights, "SwappedWeights", only_admin=True)
    _post(app, "/v1/restart", admin.RestartBody, admin.restart, "Restarted", only_admin=True)
    _post(app, "/v1/adapters", admin.AdapterBody, admin.load_adapter, "Adapter", only_admin=True)
    _get(app, "/v1/adapters", admin.list_adapters, "Adapters")
    _route(app, "DELETE", "/v1/adapters/{name:path}", admin.remove_adapter, about("Adapter", only_admin=True))
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        _post(app, path, admin.LoraBody, admin.lora, "text/plain", only_admin=True)
    _get(app, "/v1/models", models.list_models, "Models")
    _get(app, "/v1/models/{model:path}", models.get_model, "Model")
    _get(app, "/v1/buckets", models.list_buckets, "Buckets")
    _get(app, "/livez", health.livez, "Status")
    _get(app, "/readyz", health.readyz, "Status")
    _get(app, "/health", health.health, "Status")
    _get(app, "/ping", health.readyz, "Status")  # SageMaker's
    _get(app, "/version", health.version, "Versions")
    _get(app, "/metrics", health.metrics, "text/plain")
    if settings.page:
        add_page(app)
    app.openapi = functools.cache(
        functools.partial(document, app, app.state.bodies, keyless=not context.keys.closed, root=settings.root_path)
    )
    return app


def _route(
    app: FastAPI, method: str, path: str, handler: Callable[..., Awaitable[Any]], told: dict[str, Any], **more: Any
) -> None:
    app.add_api_route(path, handler, methods=[method], response_model=None, openapi_extra=told, **more)


def _get(app: FastAPI, path: str, handler: Callable[..., Awaitable[Any]], answer: str) -> None:
    _route(app, "GET", path, handler, about(answer))
    _route(app, "HEAD", path, handler, {}, include_in_schema=False)


def _post(
    app: FastAPI,
    path: str,
    kind: type[Body],
    handler: Callable[[Request, Any], Awaitable[Any]],
    answer: str,
    events: str = "",
    *,
    ready: bool = True,
    only_admin: bool = False,
) -> None:
    app.state.bodies.append(kind)
    told = about(answer, events, kind.__name__, only_admin)
    name = kind.__name__.removesuffix("Body")
    called = endpoint(kind, handler, ready, only_admin)
    _route(app, "POST", path, called, told, name=name, description=handler.__doc__)


async def invocations(request: Request) -> Any:
    """SageMaker's one route, whose fields select ours: chat (``messages``), completion (``prompt``), embedding or
    classification (``input``) or tensors (``inputs``)."""
    context_of(request).models.require_ready()
    data = await json_body(request)
    name = data.get("model")
    service = choose_model(request, name if isinstance(name, str) else None)
    if data.get("messages") is not None:
        return await answered(request, ChatBody, chat, data)
    if data.get("prompt") is not None:
        return await answered(request, CompletionBody, completions, data)
    if data.get("input") is not None:
        if service.main_route == "/v1/classify":
            return await answered(request, ClassifyBody, classify, data)
        return await answered(request, EmbeddingBody, embeddings, data)
    if data.get("inputs") is not None or data.get("safetensors") is not None:
        return await answered(request, PredictBody, predict, data)
    needed = {"generate": "`prompt` or `messages`", "embed": "`input`", "classify": "`input`"}
    why = "the body holds none of `messages`, `prompt`, `input`, `inputs` and `safetensors`; for this model send "
    raise bad_request(why + needed.get(service.task, "`inputs`"), code="missing_parameter")


async def _http_exception(request: Request, error: Any) -> Any:
    """Convert the framework's own errors (404, 405), each an HTTPException, to our format."""
    path = request.scope["path"].encode("utf-8", "backslashreplace").decode()[:200]
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 404:
        message = f"there is no {request.method} {path}"
    elif error.status_code == 405:
        message = f"{path} does not take {request.method}; it takes {headers.get('allow', 'another method')}"
    else:
        message = str(error.detail)
    raise ApiError(error.status_code if error.status_code in STATUSES else 400, message, headers=headers)
