"""Models on XLA's replicas behind the real server, which say what the eager backend or plain PyTorch does."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.xla.rig import require

require()

from nxd_infer.hugging_face import weights as hf  # noqa: E402
from nxd_infer.trace.recompile import parallel_model_recompile  # noqa: E402
from nxd_models.serving import tasks  # noqa: E402
from tests.support.adapter_files import merge, write_adapter  # noqa: E402
from tests.support.e2e.command import nxd_infer  # noqa: E402
from tests.support.http.http_artifacts import PROMPTS, real_server, trace_tiny  # noqa: E402
from tests.support.http.http_servers import ServerProcess, is_error, wait_for  # noqa: E402
from tests.support.models.helpers import prompts_of  # noqa: E402

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


@pytest.mark.parametrize(
    ("family", "degree", "task", "output"),
    [("bert_classifier", 2, "classify", "logits"), ("roberta", 4, "embed", "embedding")],
)
def test_an_encoder_gives_eagers_numbers(family: str, degree: int, task: str, output: str, tmp_path: Path) -> None:
    shapes: dict[str, Any] = {"batch_sizes": [4], "prompt_buckets": [8]}
    artifact = trace_tiny(family, task, tmp_path, tp=degree, backend="xla", **shapes)
    rows = [torch.tensor([ids]) for ids in prompts_of((6, 3, 8), 280, seed=3)]
    given = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        for ids in rows
    ]
    plan = tasks.plan(tmp_path / "model", task, dtype=torch.float32, **shapes)
    module = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())  # at degree 1
    with torch.no_grad():
        wanted = torch.cat([module(*inputs.values())[output] for inputs in given])

    def numbers(inputs: dict[str, Tensor]) -> Tensor:
        body = {"inputs": {name: value.tolist() for name, value in inputs.items()}}
        answer = server.post("/v1/predict", body)
        assert answer.status_code == 200, answer.text
        return torch.tensor(answer.json()["outputs"][output]["data"])

    with real_server(artifact) as server, ThreadPoolExecutor(len(given)) as threads:
        assert len(server.get("/health").json()["ranks"]) == degree
        for found in (map(numbers, given), threads.map(numbers, given)):
            torch.testing.assert_close(torch.cat(list(found)), wanted, atol=1e-5, rtol=1e-5)
