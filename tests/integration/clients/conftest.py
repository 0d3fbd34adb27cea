"""A server of each kind, run by the Python of .venv; that of the clients has neither nxd-infer nor torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http.http_servers import ROOT, ServerProcess

SERVER_PYTHON = os.environ["SERVER_PYTHON"]
NOBODY_CALLED = {  # clients that would look for prices, encodings, data or newer versions elsewhere
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "AI_SDK_LOG_WARNINGS": "false",
}
os.environ |= {**NOBODY_CALLED, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``chat``, ``embeddings`` and ``reranking``, and the model of ``chat`` in ``model``."""
    place = tmp_path_factory.mktemp("artifacts")
    os.environ["HF_HOME"] = str(place / "hugging_face")
    command = [SERVER_PYTHON, "-m", "tests.integration.clients.make_artifacts", str(place)]
    environment = {**os.environ, "NXD_INFER_TESTS_SHARED": str(place / "shared")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    return place


@contextlib.contextmanager
def serving(artifact: Path) -> Iterator[str]:
    """The URL of OpenAI's API, which every client appends its routes to."""
    server = ServerProcess([SERVER_PYTHON, "-m", "nxd_infer", "serve", str(artifact), "--port", "0"])
    try:
        yield f"{server.wait_ready().url}/v1"
    finally:
        server.kill()


@pytest.fixture(scope="session")
def chat(artifacts: Path) -> Iterator[str]:
    with serving(artifacts / "chat") as url:
        yield url


@pytest.fixture(scope="session")
def embeddings(artifacts: Path) -> Iterator[str]:
    with serving(artifacts / "embeddings") as url:
        yield url


@pytest.fixture(scope="session")
def reranking(artifacts: Path) -> Iterator[str]:
    with serving(artifacts / "reranking") as url:
        yield url
