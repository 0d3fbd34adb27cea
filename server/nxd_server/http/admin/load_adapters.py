"""``/v1/adapters``: load LoRA adapters into the model's slots, list them, remove them."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request

from nxd_server.engine.adapter_slots import Adapter
from nxd_server.http.admin.allowed_paths import path_under
from nxd_server.http.admin.update_weights import unchanged
from nxd_server.http.body_schema import Body
from nxd_server.http.request_context import context_of, require_admin
from nxd_server.threads import in_thread


class AdapterBody(Body):
    """``POST /v1/adapters``."""

    name: str = Field(..., description="The name that requests give as `model`.")
    path: str = Field(..., description="The adapter's directory, under the server's weights_root.")


def _card(adapter: Adapter) -> dict[str, Any]:
    return {
        "id": adapter.name,
        "object": "adapter",
        "created": adapter.created,
        "slot": adapter.slot,
        "running": adapter.running,
    }


async def load_adapter(request: Request, body: AdapterBody) -> dict[str, Any]:
    """Load a PEFT directory under ``weights_root``; after the answer, requests may name it as their ``model``."""
    context = context_of(request)
    adapters = context.service.require_adapters()

    def load() -> Adapter:
        path = path_under(context.settings.weights_root, body.path)
        return adapters.load(body.name, path, context.settings.weights_drain_timeout)

    with unchanged("the adapter was not loaded", "adapter"):
        return _card(await in_thread(load, "nxd-adapters"))


async def list_adapters(request: Request) -> dict[str, Any]:
    """List the adapters that requests may name."""
    service = context_of(request).service
    service.require_loaded()
    return {"object": "list", "data": [_card(adapter) for adapter in service.adapters()]}


async def remove_adapter(request: Request, name: str) -> dict[str, Any]:
    """Withdraw an adapter from new requests; its slot is free when the requests in ``running`` have ended."""
    require_admin(request)
    return {**_card(context_of(request).service.require_adapters().remove(name)), "deleted": True}
