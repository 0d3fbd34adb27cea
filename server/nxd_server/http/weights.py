"""``POST /v1/weights``: swap the weights of the model that is served, while it is served."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.requests import Request

from nxd_infer.errors import ArtifactSpaceError, CheckpointError, NxdError, ShardingError, WeightSchemaError
from nxd_server.paths import path_under
from nxd_server.threads import in_thread

from .errors import ApiError
from .requests import context_of
from .schemas import WeightsBody

logger = logging.getLogger("nxd_server.http")


async def weights(request: Request, body: WeightsBody) -> dict[str, Any]:
    """Answer later requests with the weights under ``path``; returns when they are served.

    Requests that have begun are finished on the old weights, no request is refused, and no answer is of both. Weights
    that do not fit (400), another swap, or requests that run for too long (409) leave everything as it was.
    """
    context = context_of(request)
    service, settings = context.service, context.settings
    begin = time.monotonic()

    def swap() -> int:
        path = path_under(settings.weights_root, body.path)
        return service.update_weights(path, body.tag, body.timeout or settings.weights_drain_timeout)

    try:
        version = await in_thread(swap, "nxd-weights")
    except (CheckpointError, ShardingError, WeightSchemaError) as error:
        raise _unchanged(400, error, "weights_refused", "path") from error
    except (ArtifactSpaceError, OSError) as error:
        if isinstance(error, NxdError) and not isinstance(error, ArtifactSpaceError):
            raise
        raise _unchanged(503, error, "weights_unchanged") from error  # a full disk
    seconds = time.monotonic() - begin
    tag = "" if body.tag is None else f" ({body.tag})"
    logger.info("weights: version %d from %s%s after %.1f s", version, body.path, tag, seconds)
    return {"object": "weights", "version": version, "path": body.path, "tag": body.tag, "seconds": round(seconds, 3)}


def _unchanged(status: int, error: Exception, code: str, param: str | None = None) -> ApiError:
    return ApiError(status, f"the weights are unchanged: {error}", code=code, param=param)
