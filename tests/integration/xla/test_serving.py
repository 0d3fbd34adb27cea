"""A model on XLA's replicas behind the real server: it says what the eager backend says of the same artifact."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.xla.rig import require

require()

from nxd_infer.runtime.load import load_artifact  # noqa: E402
from nxd_infer.trace.recompile import parallel_model_recompile  # noqa: E402
from tests.support.adapter_files import merge, write_adapter  # noqa: E402
from tests.support.e2e.command import nxd_infer  # noqa: E402
from tests.support.http.http_artifacts import PROMPTS, real_server, trace_tiny  # noqa: E402
from tests.support.http.http_servers import ServerProcess, is_error, wait_for  # noqa: E402

ADMIN = {"authorization": "Bearer admin"}
COMPLETIONS = "/v1/completions"
DRAWN = {"temperature": 0.9, "seed": 5, "presence_penalty": 0.5}
REPEATED = "the with for the with for the with"
"""Its continuation is guessed from what came before."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama at degree 2 with guesses and slots for adapters, for both backends, and what they are given."""
    root = tmp_path_factory.mktemp("serving")
    shapes = {"batch_sizes": [1, 4], "prompt_buckets": [16], "max_len": 64}
    features = {"speculate": 2, "lora_slots": 2, "lora_rank": 4}
    made = trace_tiny("llama", "generate", root, backend="xla", **shapes, **features)
    made.rename(root / "xla")
    parallel_model_recompile(root / "xla", root / "eager", backend="eager")
    files = root / "files"
    adapter = write_adapter(files / "x", root / "model", rank=4)
    merge(root / "model", adapter, files / "new")
    return root


def server_of(root: Path, backend: str) -> Any:
    options = ("--admin-key", "admin", "--weights-root", str(root / "files"), "--lora", f"x={root / 'files' / 'x'}")
    return real_server(root / backend, *options, "--recovery-timeout", "300", "--speculate", "2")


def ask(server: ServerProcess, prompt: str, **more: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def requests() -> list[dict[str, Any]]:
    prompts = [*PROMPTS[:4], REPEATED]
    drawn = [{"prompt": prompt, **DRAWN, "seed": number} for number, prompt in enumerate(prompts)]
    return [*({"prompt": prompt} for prompt in prompts), *drawn, {"prompt": PROMPTS[0], "model": "x"}]


def swap(server: ServerProcess, path: Path) -> None:
    answer = server.post("/v1/weights", {"path": str(path)}, headers=ADMIN)
    assert answer.status_code == 200, answer.text


def conversation(server: ServerProcess, root: Path) -> dict[str, list[str]]:
    """What a server answers one by one, with an adapter that comes meanwhile, and with other weights."""
    found = {"alone": [ask(server, **request) for request in requests()]}
    body = {"name": "y", "path": "x"}
    assert server.post("/v1/adapters", body, headers=ADMIN).status_code == 200
    found["adapter"] = [ask(server, PROMPTS[0], model="y")]
    swap(server, root / "files" / "new")
    found["other weights"] = [ask(server, prompt) for prompt in PROMPTS[:2]]
    return found


@pytest.fixture(scope="module")
def wanted(root: Path) -> dict[str, list[str]]:
    """The eager backend's answers, from two processes over gloo."""
    with server_of(root, "eager") as server:
        return conversation(server, root)


@pytest.fixture(scope="module")
def server(root: Path) -> Any:
    with server_of(root, "xla") as server:
        yield server


def test_one_program_is_stored_for_both_ranks(root: Path) -> None:
    manifest = load_artifact(root / "xla").manifest
    assert all(len(set(bucket.graphs)) == 1 for bucket in manifest.buckets) and manifest.ops == []


def test_batched_and_seeded_answers_are_those_given_alone(server: ServerProcess) -> None:
    alone = [ask(server, **request) for request in requests()]
    with ThreadPoolExecutor(len(alone)) as threads:
        for _ in range(2):
            assert list(threads.map(lambda request: ask(server, **request), requests())) == alone


def test_its_answers_are_the_eager_backends(server: ServerProcess, root: Path, wanted: dict[str, list[str]]) -> None:
    assert conversation(server, root) == wanted
    assert wanted["adapter"] == wanted["alone"][-1:] != wanted["alone"][:1]
    assert wanted["other weights"] != wanted["alone"][:2]


def test_right_guesses_are_taken(server: ServerProcess) -> None:
    """Of so many some are verified, however slow that was when the server measured it."""
    ask(server, REPEATED, max_tokens=36, logit_bias={"7": 100})
    assert server.metric("nxd_spec_decode_num_accepted_tokens_total") > 0


def test_the_command_line_verifies_and_generates(root: Path, wanted: dict[str, list[str]]) -> None:
    done = nxd_infer("verify", root / "xla", root / "model")
    assert done.status == 0 and "all 6 buckets are within the tolerance" in done.out, done.out + done.err
    done = nxd_infer("generate", root / "xla", PROMPTS[0], "--max-tokens", "6", "--temperature", "0")
    assert done.status == 0 and wanted["alone"][0].strip() in done.out, done.out + done.err


def test_a_killed_process_is_answered_by_503_and_recovery(server: ServerProcess) -> None:
    before = [ask(server, **request) for request in requests()]
    (pid,) = {rank["pid"] for rank in server.get("/health").json()["ranks"]}
    assert pid != server.process.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.get("/readyz").status_code == 503, message="nobody noticed")
    refused = server.post(COMPLETIONS, {"prompt": PROMPTS[0], "max_tokens": 2})
    is_error(refused, 503)
    wait_for(lambda: server.get("/readyz").status_code == 200, 600.0, "it did not recover")
    assert [ask(server, **request) for request in requests()] == before
    (after,) = {rank["pid"] for rank in server.get("/health").json()["ranks"]}
    assert after != pid
