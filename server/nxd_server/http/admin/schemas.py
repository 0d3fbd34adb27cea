"""Bodies of the admin routes."""

from __future__ import annotations

from pydantic import Field

from nxd_server.http.body_schema import Body


class AdapterBody(Body):
    """``POST /v1/adapters``."""

    name: str = Field(..., description="The name that requests give as `model`.")
    path: str = Field(..., description="The adapter's directory, under the server's weights_root.")


class WeightsBody(Body):
    """``POST /v1/weights``."""

    path: str = Field(..., description="A folder of checkpoints, or safetensors, under the server's weights_root.")
    tag: str | None = Field(None, description="Which checkpoint of the folder; by default the newest complete one.")
    timeout: float | None = Field(
        None, gt=0, le=86400, description="Seconds running requests may take to finish; weights_drain_timeout if null."
    )
