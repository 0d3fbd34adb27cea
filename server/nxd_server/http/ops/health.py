"""The health routes: ``/livez``, ``/readyz``, ``/health``, ``/ping``, ``/version``, ``/metrics``.

Live: this process answers. Ready: a request sent now would be served. Healthy: a step of the model completed
recently. They reveal nothing secret; all but `/version` need no key.
"""

from __future__ import annotations

import platform
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nxd_infer.runtime.ranks import RankHealth
from nxd_infer.util.machine import torch_version
from nxd_infer.util.version import VERSION
from nxd_server.http.error_responses import ApiError, encode
from nxd_server.http.ops.metrics import CONTENT_TYPE
from nxd_server.http.request_context import Context, context_of


def _answer(status: int, content: dict[str, Any]) -> Response:
    return Response(encode(content), status, {"cache-control": "no-store"}, "application/json")


def _verdict(context: Context, extra: dict[str, Any] | None = None) -> Response:
    ready, state, reason = context.service.readiness()
    content: dict[str, Any] = {"status": state, **(extra or {})}
    if ready:
        return _answer(200, content)
    refusal = ApiError(503, f"not ready: {reason or state}", code=state, retry_after=1)
    response = _answer(503, {**content, **refusal.body()})
    response.headers["retry-after"] = refusal.headers["retry-after"]
    return response


async def livez(request: Request) -> Response:
    """Return 200 as long as the process answers, whatever the state of the model."""
    return _answer(200, {"status": "alive"})


async def readyz(request: Request) -> Response:
    """Return 200 if a request sent now would be served, else 503 with the reason."""
    return _verdict(context_of(request))


async def version(request: Request) -> dict[str, Any]:
    """Return the versions of what is running."""
    return {
        "version": VERSION,
        "torch": torch_version(),
        "python": platform.python_version(),
    }


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(context_of(request).metrics.render(), media_type=CONTENT_TYPE)


async def health(request: Request) -> Response:
    """Return every part's state, and the time since a step of the model last completed.

    The engine runs a step of padding after two idle seconds, so the age is small unless something is wrong, and
    asking costs nothing.
    """
    context = context_of(request)
    service = context.service
    engine, stats = service.health(), service.stats()
    extra: dict[str, Any] = {
        "uptime": round(time.time() - service.created, 1),
        "restarts": 0 if stats is None else stats.restarts,
        "ranks": [_rank(rank) for rank in service.ranks()],
    }
    if engine is not None:
        extra |= {"last_step_age": engine.last_step_age, "step_running": engine.step_running}
        if engine.recovering_for is not None:
            extra["recovery"] = {
                "stage": engine.stage,
                "seconds": round(engine.recovering_for, 1),
                "expected": service.recovery.expected,
                "limit": service.recovery.limit,
            }
    if stats is not None:
        extra |= {"running": stats.running, "waiting": stats.waiting, "slots_free": stats.slots_free}
    return _verdict(context, extra)


def _rank(rank: RankHealth) -> dict[str, Any]:
    return {name: getattr(rank, name) for name in ("rank", "pid", "alive", "state", "steps", "last_step_age")}
