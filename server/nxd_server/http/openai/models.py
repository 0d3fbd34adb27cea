"""``GET /v1/models``, ``GET /v1/models/{id}`` and ``GET /v1/buckets``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from nxd_server.http.ops.metrics import OF_GRAPHS
from nxd_server.http.request_context import choose_model, context_of

if TYPE_CHECKING:
    from nxd_server.app.service import Service


def _cards(service: Service) -> list[dict[str, Any]]:
    """The model by each of its names, and its adapters."""
    card = {
        "object": "model",
        "created": service.created,
        "owned_by": "nxd_infer",
        "max_model_len": service.max_len,
        "task": service.task,
        **{name: getattr(service.manifest, name) for name in ("backend", "tp_degree", "pp_degree")},
        "weight_version": service.weight_version,
    }
    if "labels" in service.metadata:
        card["labels"] = len(service.metadata["labels"])
    if service.task == "generate":
        card["chat"], card["tool_calls"] = service.chat_template is not None, service.tool_format is not None
        card["top_logprobs"] = service.top_logprobs
        card["generation_defaults"] = {**service.sampling_defaults, "stop_token_ids": list(service.eos_token_ids)}
    names = [{"id": name, **card} for name in service.model_names]
    parent = {"parent": service.model_name}
    adapters = service.adapters()
    return [*names, *({"id": one.name, **card, "created": one.created, **parent} for one in adapters)]


async def list_models(request: Request) -> dict[str, Any]:
    """Return the served models and their adapters."""
    services = context_of(request).models.services
    return {"object": "list", "data": [card for service in services for card in _cards(service)]}


async def get_model(request: Request, model: str) -> dict[str, Any]:
    """Return a model, or one of its adapters, by name; 404 for another."""
    return next(card for card in _cards(choose_model(request, model)) if card["id"] == model)


async def list_buckets(request: Request) -> dict[str, Any]:
    """Return the compiled shapes, and how often each ran for requests."""
    services = context_of(request).models.services
    return {"object": "list", "data": [bucket for service in services for bucket in _buckets(service)]}


def _buckets(service: Service) -> list[dict[str, Any]]:
    stats = service.stats()
    data = []
    for bucket in service.manifest.buckets:
        entry: dict[str, Any] = {"name": bucket.name, "object": "bucket", "model": service.model_name}
        if stats is not None:
            for name, kind, _, source in OF_GRAPHS:
                count = getattr(stats, source).get(bucket.name, 0 if kind == "counter" else None)
                entry[name.removeprefix("bucket_")] = count
        entry["inputs"] = [_tensor(spec) for spec in bucket.inputs]
        entry["outputs"] = [_tensor(spec) for spec in bucket.outputs]
        data.append(entry)
    return data


def _tensor(spec: Any) -> dict[str, Any]:
    more = {name: getattr(spec, name, None) for name in ("default", "minimum", "maximum")}
    declared = {name: value for name, value in more.items() if value is not None}
    return {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape, **declared}
