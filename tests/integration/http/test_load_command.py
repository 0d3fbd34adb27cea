"""``nxd-infer bench`` and ``nxd-infer top`` against a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.http.http_servers import toy_server


@pytest.fixture(scope="module")
def server():
    with toy_server(api_keys=["k"]) as running:
        yield running


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "nxd_infer.cli.main", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_a_load_is_sent_counted_and_drawn(server, tmp_path: Path):
    files = {"--json": tmp_path / "load.json", "--plot": tmp_path / "load.svg"}
    more = [word for pair in files.items() for word in map(str, pair)]
    shape = ("--requests", "12", "--concurrency", "4", "--max-tokens", "5", "--prompt-tokens", "20", "--rate", "200")
    objective = ("--goodput", "e2el:100000", "--goodput", "ttft:100000", "--shared-prefix", "10")
    done = command("bench", server.url, "--api-key", "k", *shape, *objective, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(files["--json"].read_text())
    assert found["failed"] == 0 and len(found["streams"]) == 12 and found["goodput_per_second"] > 0
    for stream in found["streams"]:
        assert stream["tokens"] == 5 and stream["prompt_tokens"] > 0 and 0 < stream["ttft"] <= stream["e2el"]
    rate = sum(stream["tokens"] for stream in found["streams"]) / found["seconds"]
    assert found["tokens_per_second"] == pytest.approx(rate)
    assert (
        found["goodput_per_second"] == pytest.approx(found["requests_per_second"]) and "api_key" not in found["options"]
    )
    assert "<svg" in files["--plot"].read_text() and "time to first token" in done.stdout
    assert server.metric("nxd_generation_tokens_total") >= 12 * 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("URL",), "/v1/models answered 401"),
        (("URL", "--api-key", "k", "--model", "other"), "status 404"),
        (("http://127.0.0.1:9",), "cannot be reached"),
        (("./nothing",), "neither an artifact nor a URL"),
        (("URL", "--goodput", "ttft=3"), "ttft:500"),
        (("URL", "--plot", "load.xyz"), "'load.xyz': let its name end in"),  # before a request, which has no key
        (("URL", "--shared-prefix", "900"), "at most prompt_tokens (128), got 900"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(server, arguments: tuple[str, ...], says: str):
    done = command("bench", *(word.replace("URL", server.url) for word in arguments))
    assert done.returncode != 0 and says in re.sub(r"[\s│]+", " ", done.stdout + done.stderr)
    assert "Traceback" not in done.stderr


def test_top_shows_what_a_server_is_doing(server):
    done = command("top", server.url, "--api-key", "k", "--once", "--every", "0.2")
    assert done.returncode == 0, done.stderr
    title, *_ = done.stdout.splitlines()
    assert re.search(r": speeds and times of the last \d+\.\d s, without a request$", title.rstrip()), title
    assert done.stdout.endswith("\n")
    assert "ready" in done.stdout and "slots in use" in done.stdout and "rank" in done.stdout
