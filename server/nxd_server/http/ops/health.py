"""The health routes: ``/livez``, ``/readyz``, ``/health``, ``/ping``, ``/version``, ``/metrics``.

Live: this process answers. Ready: a request sent now would be served. Healthy: a step of the model completed
recently. They reveal nothing secret; all but `/version` need no key.
"""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from nxd_infer.runtime.ranks import RankHealth
from nxd_infer.util.machine import torch_version
from nxd_infer.util.version import VERSION
from nxd_server.http.error_responses import ApiError, encode
from nxd_server.http.ops.metrics import CONTENT_TYPE
from nxd_server.http.request_context import Context, context_of

if TYPE_CHECKING:
    from nxd_server.app.replica import Replica
    from nxd_server.app.service import Service


FRESH = {"cache-control": "no-store"}


def _answer(content: dict[str, Any]) -> Response:
    return Response(encode(content), 200, FRESH, "application/json")


def _verdict(context: Context, extra: dict[str, Any] | None = None) -> Response:
    ready, state, reason = context.models.readiness()
    content: dict[str, Any] = {"status": state, **(extra or {})}
    if ready:
        return _answer(content)
    refusal = ApiError(503, f"not ready: {reason or state}", code=state, retry_after=1, headers=FRESH)
    return refusal.response({**content, **refusal.body()})


async def livez(request: Request) -> Response:
    """Return 200 as long as the process answers, whatever the state of the model."""
    return _answer({"status": "alive"})


async def readyz(request: Request) -> Response:
    """Return 200 if a request sent now would be served, else 503 with the reason."""
    return _verdict(context_of(request))


async def version(request: Request) -> dict[str, Any]:
    """Return the versions of what is running."""
    return {"version": VERSION, "torch": torch_version(), "python": platform.python_version()}


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(context_of(request).metrics.render(), media_type=CONTENT_TYPE)


async def health(request: Request) -> Response:
    """Return every part's state, and the time since a step of the model last completed.

    The engine runs a step of padding after two idle seconds, so the age is small unless something is wrong, and
    asking costs nothing.
    """
    context = context_of(request)
    services = context.models.services
    replicas = [replica for service in services for replica in service.replicas]
    extra: dict[str, Any] = {"uptime": round(time.time() - services[0].created, 1), **_copy(replicas[0])}
    if len(replicas) > 1:
        stats = [stats for service in services if (stats := service.stats()) is not None]
        counts = ("restarts", "running", "waiting", "slots_free")
        extra |= {name: sum(getattr(one, name) for one in stats) for name in counts}
        extra["ranks"] = [_rank(rank) for service in services for rank in service.ranks()]
        extra["models"] = {service.model_name: _model(service) for service in services}
    return _verdict(context, extra)


def _model(service: Service) -> dict[str, Any]:
    copies = []
    for replica in service.replicas:
        ready, state, reason = replica.readiness()
        copies.append({"status": state, **({} if ready else {"reason": reason}), **_copy(replica)})
    return {"status": service.readiness()[1], "copies": copies}


def _copy(replica: Replica) -> dict[str, Any]:
    found: dict[str, Any] = {"restarts": 0, "ranks": [_rank(rank) for rank in replica.ranks()]}
    if replica.engine is None:
        return found
    engine, stats = replica.engine.health(), replica.engine.stats()
    found |= {"last_step_age": engine.last_step_age, "step_running": engine.step_running}
    if engine.recovering_for is not None:
        times = {"expected": replica.recovery.expected, "limit": replica.recovery.limit}
        found["recovery"] = {"stage": engine.stage, "seconds": round(engine.recovering_for, 1), **times}
    if engine.draft is not None:
        found["draft"] = engine.draft
    found |= {"restarts": stats.restarts, "weight_version": replica.engine.gate.version}
    return found | {"running": stats.running, "waiting": stats.waiting, "slots_free": stats.slots_free}


def _rank(rank: RankHealth) -> dict[str, Any]:
    return {name: getattr(rank, name) for name in ("rank", "pid", "alive", "state", "steps", "last_step_age")}
