"""Other families at other degrees behind the real server: batched answers are those given alone, also after a fault."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.xla.rig import require

require()

from tests.http.http_artifacts import PROMPTS, real_server, trace_tiny  # noqa: E402
from tests.http.http_servers import ServerProcess, is_error, wait_for  # noqa: E402

REQUESTS = [*({"prompt": prompt, "temperature": 0} for prompt in PROMPTS[:2]), {"prompt": PROMPTS[2], "seed": 5}]


def ask(server: ServerProcess, request: dict) -> str:
    answer = server.post("/v1/completions", {"max_tokens": 4, "ignore_eos": True, **request})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(("family", "degree"), [("qwen3", 1), ("llama3", 4)])
def test_answers_are_those_given_alone_and_survive_a_fault(family: str, degree: int, tmp_path: Path) -> None:
    shapes = {"batch_sizes": [4], "prompt_buckets": [8], "max_len": 32}
    artifact = trace_tiny(family, "generate", tmp_path, tp=degree, backend="xla", **shapes)
    with real_server(artifact, "--recovery-timeout", "300") as server:
        alone = [ask(server, request) for request in REQUESTS]
        with ThreadPoolExecutor(len(REQUESTS)) as threads:
            assert list(threads.map(lambda request: ask(server, request), REQUESTS)) == alone
        ranks = server.get("/health").json()["ranks"]
        assert len(ranks) == degree and len({rank["pid"] for rank in ranks}) == 1
        os.kill(ranks[0]["pid"], signal.SIGKILL)
        wait_for(lambda: server.get("/readyz").status_code == 503, message="nobody noticed")
        is_error(server.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 2}), 503)
        wait_for(lambda: server.get("/readyz").status_code == 200, 600.0, "it did not recover")
        assert [ask(server, request) for request in REQUESTS] == alone
