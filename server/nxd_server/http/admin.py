"""The admin routes, which change what is served (``/v1/weights``, ``/v1/adapters``), and the paths they may name."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from nxd_infer.errors import (
    ArtifactError,
    ArtifactSpaceError,
    CheckpointError,
    CheckpointTagError,
    NxdError,
    ShardingError,
    WeightSchemaError,
)
from nxd_infer.util.ownership import others_may_change, shown, way_to
from nxd_server.engine.adapter_slots import Adapter
from nxd_server.errors import AdapterConflictError, ForbiddenPathError, RequestError
from nxd_server.http.error_responses import ApiError
from nxd_server.http.request_body import Body, Neutral, is_one_of
from nxd_server.http.request_context import context_of
from nxd_server.http.scope_keys import FIELDS
from nxd_server.threads import in_thread

logger = logging.getLogger("nxd_server.http")


TIMEOUT: Any = Field(
    None, gt=0, le=86400, description="Seconds running requests may take to finish; weights_drain_timeout if null."
)


class WeightsBody(Body):
    """``POST /v1/weights``."""

    path: str = Field(..., description="A folder of checkpoints, or safetensors, under the server's weights_root.")
    tag: str | None = Field(None, description="Which checkpoint of the folder; by default the newest complete one.")
    timeout: float | None = TIMEOUT


async def weights(request: Request, body: WeightsBody) -> dict[str, Any]:
    """Answer later requests with the weights under ``path``; returns once these are in use.

    Requests that have begun finish on the old weights, none is rejected, and no answer mixes the two. Weights that do
    not fit (400), another swap, or requests that run for too long (409) leave everything unchanged. Of several copies
    one after the other is changed, so that the others answer; a 409 says if only some could be.
    """
    context = context_of(request)
    service, settings = context.service, context.settings
    begin = time.monotonic()

    def swap() -> int:
        path = path_under(settings.weights_root, body.path)
        timeout = body.timeout or settings.weights_drain_timeout
        return service.update_weights(path, body.tag, timeout)

    with unchanged("the weights are unchanged", "weights"):
        version = await in_thread(swap, "nxd-weights")
    seconds = time.monotonic() - begin
    tag = "" if body.tag is None else f" ({body.tag})"
    logger.info("weights: version %d from %s%s after %.1f s", version, body.path, tag, seconds)
    return {"object": "weights", "version": version, "path": body.path, "tag": body.tag, "seconds": round(seconds, 3)}


class RestartBody(Body):
    """``POST /v1/restart``."""

    timeout: float | None = TIMEOUT


async def restart(request: Request, body: RestartBody) -> dict[str, Any]:
    """Start the ranks anew, one copy after the other; requests that have begun finish first, and none is rejected."""
    context = context_of(request)
    service, timeout = context.service, body.timeout or context.settings.weights_drain_timeout
    begin = time.monotonic()
    await in_thread(lambda: service.restart(timeout), "nxd-restart")
    return {"object": "restart", "copies": len(service.replicas), "seconds": round(time.monotonic() - begin, 3)}


class AdapterBody(Body):
    """``POST /v1/adapters``."""

    name: str = Field(..., description="The name that requests give as `model`.")
    path: str = Field(..., description="The adapter's directory, under the server's weights_root.")


def _card(adapter: Adapter) -> dict[str, Any]:
    told = {name: getattr(adapter, name) for name in ("created", "slot", "running")}
    return {"id": adapter.name, "object": "adapter", **told}


async def load_adapter(request: Request, body: AdapterBody) -> dict[str, Any]:
    """Load a PEFT directory under ``weights_root``; after the answer, requests may name it as their ``model``."""
    context = context_of(request)
    service = context.service
    if context.models.find(body.name) not in (None, service):
        raise AdapterConflictError(f"{body.name!r} is the name of another model, or of its adapter: choose another one")

    def load() -> Adapter:
        path = path_under(context.settings.weights_root, body.path)
        return service.load_adapter(body.name, path, context.settings.weights_drain_timeout)

    with unchanged("the adapter was not loaded", "adapter"):
        return _card(await in_thread(load, "nxd-adapters"))


class LoraBody(Body):
    """``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them."""

    HARMLESS: ClassVar[frozenset[str]] = Body.HARMLESS | {"lora_int_id"}
    NEUTRAL: ClassVar[Neutral] = {"load_inplace": is_one_of(False)}

    lora_name: str
    lora_path: str | None = Field(None, description="Of one that is loaded.")

    @property
    def asks_for(self) -> str | None:
        return self.model or (self.lora_name if self.lora_path is None else None)


async def lora(request: Request, body: LoraBody) -> Response:
    """The routes of adapters by vLLM's names."""
    request.scope[FIELDS] = {"name": "lora_name", "path": "lora_path"}
    loads = request.scope["path"] == "/v1/load_lora_adapter"
    if loads:
        await load_adapter(request, AdapterBody(name=body.lora_name, path=body.lora_path or "", model=body.model))
    else:
        await remove_adapter(request, body.lora_name)
    done = "added" if loads else "removed"
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' {done} successfully.")


async def list_adapters(request: Request) -> dict[str, Any]:
    """List the adapters that requests may name."""
    services = context_of(request).models.services
    for service in services:
        service.require_loaded()
    return {"object": "list", "data": [_card(adapter) for service in services for adapter in service.adapters()]}


async def remove_adapter(request: Request, name: str) -> dict[str, Any]:
    """Withdraw an adapter from new requests; its slot is free when the requests in ``running`` have ended."""
    context = context_of(request)
    context.keys.check_admin(request.scope)
    service = context.models.find(name) or context.service
    return {**_card(await asyncio.to_thread(service.remove_adapter, name)), "deleted": True}


@contextlib.contextmanager
def unchanged(what: str, code: str) -> Iterator[None]:
    """Map the errors of a change: 400 if it does not fit, 503 if files cannot be written.

    ``what`` describes the unchanged state; ``code`` begins the error codes.
    """
    try:
        yield
    except (CheckpointError, ShardingError, WeightSchemaError) as error:
        param = "tag" if isinstance(error, CheckpointTagError) else "path"
        raise ApiError(400, f"{what}: {error}", code=f"{code}_refused", param=param) from error
    except ArtifactSpaceError as error:
        raise ApiError(503, f"{what}: {error}", code="no_space") from error
    except (ArtifactError, OSError) as error:
        if isinstance(error, NxdError) and not isinstance(error, ArtifactError):
            raise  # a forbidden path, ranks that are late
        raise ApiError(503, f"{what}: {error}", code=f"{code}_unchanged") from error


# --- paths from requests: beneath weights_root, where nobody but the server's user and root can change anything ---


def path_under(root: Path | None, name: str, field: str = "path") -> Path:
    """Return the file or folder ``name`` (relative to ``root``, or absolute) with its links resolved.

    A folder is searched, including the targets of its links, so that nothing in it leads outside either. Entries
    deleted meanwhile (by a running save) are skipped. Raises ForbiddenPathError without a root, for ``..``, for
    anything outside the root, and for what other users may change; RequestError naming ``field`` if it does not exist
    or is neither a file nor a folder.
    """
    if root is None:
        raise ForbiddenPathError("this server reads no paths: start it with --weights-root (NXD_INFER_WEIGHTS_ROOT)")
    if not name or "\0" in name:
        raise RequestError(field, "is not a path")
    if ".." in Path(name).parts:
        raise ForbiddenPathError(f"{field}: '..' is not followed; give the path itself, under {root}")
    base = root.resolve()
    try:
        resolved = _checked(base, base / name, field)
        resolved.stat()
        _search(base, resolved, field)
    except (ForbiddenPathError, RequestError):
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(field, f"there is no file or folder {name!r} under {root}") from None
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, or an invalid file name
        raise RequestError(field, f"cannot be followed: {error}") from None
    return resolved


def _search(base: Path, top: Path, field: str) -> None:
    rest, seen = [top], {top}
    while rest:
        path = rest.pop()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mode = path.stat().st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                raise RequestError(field, f"{path} is neither a file nor a folder")
            for entry in os.listdir(path) if stat.S_ISDIR(mode) else ():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    inner = _checked(base, path / entry, field)
                    if inner not in seen:  # a link may point to a folder that contains it
                        seen.add(inner)
                        rest.append(inner)


def _checked(base: Path, path: Path, field: str) -> Path:
    """Return ``path`` with its links resolved. Raises OSError if nothing is there."""
    resolved = path.resolve()
    if not resolved.is_relative_to(base):
        raise ForbiddenPathError(f"{field}: {str(path)!r} lies outside {base}, or links there")
    for entry in way_to(path):
        info = entry.lstat()
        if others_may_change(info):
            raise ForbiddenPathError(
                f"{field}: {shown(entry, info)}: other users could change what is loaded from there, so nothing is; it "
                f"must belong to the server's user or to root, and no other may write to it (`chmod go-w {entry}`)"
            )
    return resolved
