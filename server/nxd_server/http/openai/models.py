"""``GET /v1/models``, ``GET /v1/models/{id}`` and ``GET /v1/buckets``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from nxd_server.http.request_context import check_model, context_of


def _card(request: Request) -> dict[str, Any]:
    service = context_of(request).service
    service.require_loaded()
    card = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "nxd_infer",
        "max_model_len": service.max_len,
        "task": service.task,
        "backend": service.manifest.backend,
        "tp_degree": service.manifest.tp_degree,
        "pp_degree": service.manifest.pp_degree,
        "weight_version": service.weight_version,
    }
    if "labels" in service.metadata:
        card["labels"] = len(service.metadata["labels"])
    if service.task == "generate":
        card["chat"], card["tool_calls"] = service.chat_template is not None, service.tool_format is not None
        card["top_logprobs"] = service.top_logprobs
        card["generation_defaults"] = {**service.sampling_defaults, "stop_token_ids": list(service.eos_token_ids)}
    return card


def _adapter_card(request: Request, adapter: Any) -> dict[str, Any]:
    base = _card(request)
    return {**base, "id": adapter.name, "created": adapter.created, "parent": base["id"]}


async def list_models(request: Request) -> dict[str, Any]:
    """Return the served model and its adapters."""
    adapters = context_of(request).service.adapters()
    return {"object": "list", "data": [_card(request), *(_adapter_card(request, adapter) for adapter in adapters)]}


async def get_model(request: Request, model: str) -> dict[str, Any]:
    """Return the model, or one of its adapters, by name; 404 for another."""
    card = _card(request)
    service = context_of(request).service
    name = check_model(service, model)
    return next((_adapter_card(request, adapter) for adapter in service.adapters() if adapter.name == name), card)


async def list_buckets(request: Request) -> dict[str, Any]:
    """Return the compiled shapes, and how often each ran for requests."""
    service = context_of(request).service
    service.require_loaded()
    stats = service.stats()
    data = []
    for bucket in service.manifest.buckets:
        entry: dict[str, Any] = {"name": bucket.name, "object": "bucket"}
        if stats is not None:
            entry |= {
                "executions": stats.bucket_steps.get(bucket.name, 0),
                "seconds": round(stats.bucket_seconds.get(bucket.name, 0.0), 6),
                "useful_tokens": stats.useful_tokens.get(bucket.name, 0),
                "padding_tokens": stats.padding_tokens.get(bucket.name, 0),
                "step_seconds": stats.step_seconds.get(bucket.name),
            }
        entry["inputs"] = [_tensor(spec) for spec in bucket.inputs]
        entry["outputs"] = [_tensor(spec) for spec in bucket.outputs]
        data.append(entry)
    return {"object": "list", "data": data}


def _tensor(spec: Any) -> dict[str, Any]:
    more = {name: getattr(spec, name, None) for name in ("default", "minimum", "maximum")}
    declared = {name: value for name, value in more.items() if value is not None}
    return {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape, **declared}
