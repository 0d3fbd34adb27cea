"""An artifact as a Ray Serve application: `serve run serve.yaml`, with this file on every node's PYTHONPATH.

A replica is one tensor-parallel group: an actor that starts the ranks as its children, so they are on one node, as the
ranks of `nxd-infer serve` are. Its routes are the server's own application, mounted as it is; Ray's proxies listen in
place of our listener, and pass requests and streams through.
"""

import asyncio
import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from nxd_infer.artifact.reader import read_artifact
from nxd_server.app.models import Models
from nxd_server.app.prepare import prepare
from nxd_server.app.service import Service
from nxd_server.errors import SettingsError
from nxd_server.http.app import create_app
from nxd_server.http.ops import logs
from nxd_server.http.protocol import MOST_BY_DEFAULT
from nxd_server.settings import ServerSettings

CLOSE_SECONDS = 15
POLL_SECONDS = 0.05
LOAD = "load"


class Arguments(BaseModel):
    """What `args` of serve.yaml may have."""

    model_config = ConfigDict(extra="forbid")

    artifact: str
    """A directory that every node has, or a URL: what `nxd-infer serve` takes."""
    resource: Literal["CPU", "neuron_cores"] | None = None
    """What a rank needs on its node; by default what the artifact was compiled for."""
    per_rank: int = Field(1, ge=1)
    """How many of these; of CPU, the threads too that a rank computes with."""
    autoscaling: dict[str, Any] = {}
    """Fields of Ray Serve's AutoscalingConfig: `min_replicas`, `max_replicas`, `upscale_delay_s` ..."""
    settings: dict[str, Any] = {}
    """Settings of the server (docs/deploying.md). Keys are better in a node's environment: NXD_INFER_API_KEYS."""


def checked(arguments: Arguments) -> ServerSettings:
    """The server's settings on this node. Raises SettingsError for those that do not go with replicas."""
    own = {"threads_per_rank": arguments.per_rank} if arguments.resource == "CPU" else {}
    given = {"host": "0.0.0.0", **own, **arguments.settings}  # Ray's proxies listen for others
    settings = ServerSettings.resolve(**given)
    if settings.admin() is not None:
        raise SettingsError(
            "admin_key opens routes that change one replica, and the others would go on with other weights: unset it "
            "(NXD_INFER_ADMIN_KEY), and deploy another artifact, which Ray Serve rolls out"
        )
    return settings


@serve.ingress()
class Server:
    """One replica. Ray Serve sends it requests once `__init__` has ended."""

    service: Service | None = None

    async def __init__(self, arguments: Arguments):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as `nxd-infer serve` has it
        self.settings = checked(arguments)
        logs.configure(self.settings.log_format, self.settings.log_level)
        artifact = await asyncio.to_thread(prepare, arguments.artifact, self.settings)
        self.service = Service(artifact, self.settings)
        self.service.start()
        while not self.service.ready:  # within `start_timeout`, or it fails
            self.check_health()
            await asyncio.sleep(POLL_SECONDS)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(Models([self.service]), self.settings)

    def check_health(self) -> None:
        """Raise once the ranks cannot be started again: Ray Serve then replaces the replica."""
        if self.service.failure is not None:
            raise RuntimeError(self.service.failure)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """How many times over the choices that run and wait here fill the slots (of one-shot models: a request)."""
        stats = self.service.stats()
        return {LOAD: (stats.running + stats.waiting) / max(1, stats.slots)}

    def __del__(self) -> None:  # Ray Serve calls it once the running requests have ended
        if self.service is not None:
            self.service.close()


def by_queue(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """As many replicas as have slots for all choices that run and wait."""
    loads = (context.aggregated_metrics or {}).get(LOAD)
    return (sum(loads.values()) if loads else context.target_num_replicas), {}


def build(arguments: Arguments) -> serve.Application:  # Ray Serve reads the annotation: it must not be text
    """The application. Raises SettingsError, or ArtifactError, as `nxd-infer serve` does."""
    manifest = read_artifact(prepare(arguments.artifact, checked(arguments))).manifest
    resource = arguments.resource or ("neuron_cores" if manifest.backend == "neuron" else "CPU")
    arguments = arguments.model_copy(update={"resource": resource})
    settings = checked(arguments)
    needed = manifest.world_size * arguments.per_rank
    # The ranks are one actor's children, so all that they need is that actor's: a group is placed whole or not at all.
    # Ray gives it its own NeuronCores (NEURON_RT_VISIBLE_CORES), which ranks of the backend `neuron` keep to.
    actor = {"num_cpus": needed} if resource == "CPU" else {"num_cpus": 0, "resources": {resource: needed}}
    policy = AutoscalingPolicy(policy_function=by_queue)
    deployment = serve.deployment(
        Server,
        name="Server",
        ray_actor_options=actor,
        autoscaling_config=AutoscalingConfig(policy=policy, **arguments.autoscaling),
        # More than a replica takes: its own queue says when it is full (429), as without Ray.
        max_ongoing_requests=2 * MOST_BY_DEFAULT,
        graceful_shutdown_timeout_s=settings.drain_timeout + CLOSE_SECONDS,
        health_check_period_s=5,
    )
    return deployment.bind(arguments)
