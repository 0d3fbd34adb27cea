"""``POST /v1/weights``: swap the weights of the served model while it is serving."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from pydantic import Field
from starlette.requests import Request

from nxd_infer.errors import (
    ArtifactError,
    ArtifactSpaceError,
    CheckpointError,
    CheckpointTagError,
    NxdError,
    ShardingError,
    WeightSchemaError,
)
from nxd_server.http.admin.allowed_paths import path_under
from nxd_server.http.body_schema import Body
from nxd_server.http.error_responses import ApiError
from nxd_server.http.request_context import context_of
from nxd_server.threads import in_thread

logger = logging.getLogger("nxd_server.http")


class WeightsBody(Body):
    """``POST /v1/weights``."""

    path: str = Field(..., description="A folder of checkpoints, or safetensors, under the server's weights_root.")
    tag: str | None = Field(None, description="Which checkpoint of the folder; by default the newest complete one.")
    timeout: float | None = Field(
        None, gt=0, le=86400, description="Seconds running requests may take to finish; weights_drain_timeout if null."
    )


async def weights(request: Request, body: WeightsBody) -> dict[str, Any]:
    """Answer later requests with the weights under ``path``; returns once these are in use.

    Requests that have begun finish on the old weights, none is rejected, and no answer mixes the two. Weights that do
    not fit (400), another swap, or requests that run for too long (409) leave everything unchanged.
    """
    context = context_of(request)
    service, settings = context.service, context.settings
    begin = time.monotonic()

    def swap() -> int:
        path = path_under(settings.weights_root, body.path)
        return service.update_weights(path, body.tag, body.timeout or settings.weights_drain_timeout)

    with unchanged("the weights are unchanged", "weights"):
        version = await in_thread(swap, "nxd-weights")
    seconds = time.monotonic() - begin
    tag = "" if body.tag is None else f" ({body.tag})"
    logger.info("weights: version %d from %s%s after %.1f s", version, body.path, tag, seconds)
    return {"object": "weights", "version": version, "path": body.path, "tag": body.tag, "seconds": round(seconds, 3)}


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
