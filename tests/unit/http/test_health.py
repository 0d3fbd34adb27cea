"""What the health routes say of a server that is not ready."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from nxd_server.http.ops import health


def test_a_reason_may_name_a_file_whose_name_is_no_text():
    models = SimpleNamespace(readiness=lambda: (False, "failed", "the artifact /m/\udcff is missing"))
    app: Any = SimpleNamespace(state=SimpleNamespace(context=SimpleNamespace(models=models)))
    response = asyncio.run(health.readyz(SimpleNamespace(app=app, scope={})))  # pyright: ignore[reportArgumentType]
    assert response.status_code == 503
    assert "/m/\udcff is missing" in json.loads(bytes(response.body))["error"]["message"]
