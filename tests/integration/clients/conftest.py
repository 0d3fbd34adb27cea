"""A server of each kind, run by the Python of .venv; that of the clients has no nxd-infer."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http.http_servers import ROOT, ServerProcess

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nobody else is called, for prices or anything
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",  # each takes seconds to start
}


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``chat``, ``embeddings`` and ``reranking``, and the model of ``chat`` in ``model``."""
    place = tmp_path_factory.mktemp("artifacts")
    os.environ.update(ENVIRONMENT, MODEL_FOLDER=str(place / "model"))  # before a client is imported
    command = [os.environ["SERVER_PYTHON"], "-m", "tests.integration.clients.make_artifacts", str(place)]
    environment = {**os.environ, "NXD_INFER_TESTS_SHARED": str(place / "shared")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    return place


@contextlib.contextmanager
def serving(artifact: Path) -> Iterator[str]:
    """The URL of OpenAI's API, which every client appends its routes to."""
    server = ServerProcess([os.environ["SERVER_PYTHON"], "-m", "nxd_infer", "serve", str(artifact), "--port", "0"])
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
