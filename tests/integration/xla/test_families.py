"""Families behind the real server, whose replicas load an artifact's HLO, and no model code; test_lowering has all.

Greedy, drawn with a seed, and after a prompt of two pieces, it says what eager says, alone and with others beside it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.xla.rig import require

require()

from nxd_models.hf import weights as hf  # noqa: E402
from nxd_models.serving import tasks  # noqa: E402
from nxd_models.serving.eager_generation import Generated, generate_eager  # noqa: E402
from nxd_server.http.openai.logprobs import legacy_name  # noqa: E402
from nxd_server.text.tokenizer import Tokenizer  # noqa: E402
from tests.integration.xla.rig import lower_here  # noqa: E402
from tests.support.http.http_artifacts import real_server, trace_tiny  # noqa: E402
from tests.support.http.http_servers import ServerProcess  # noqa: E402
from tests.support.models.helpers import prompts_of  # noqa: E402

PIECE, NEW = 4, 5
SHAPES: dict[str, Any] = {"batch_sizes": [4], "prompt_buckets": [PIECE], "max_len": 64}
PROMPTS = [*prompts_of((3, PIECE + 2, 3), 280, seed=30), [20, 21, 22] * 3]
SAMPLING = {
    "temperature": [0.0, 0.0, 0.8, 0.0],
    "seed": [0, 0, 5, 0],
    "top_p": [1.0, 1.0, 0.9, 1.0],
    "presence_penalty": [0.0, 0.0, 0.4, 0.0],
}
"""Of each prompt."""
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, **{name: values[row] for name, values in SAMPLING.items()}} for row, prompt in enumerate(PROMPTS)
]
ENCODERS = {
    "roberta": ("embed", "embedding"),
    "bert_classifier": ("classify", "logits"),
}
"""Their tasks and outputs."""


@pytest.fixture(scope="module", autouse=True)
def here() -> Any:
    with lower_here():
        yield


def module_of(model: Path, task: str, **shapes: Any) -> Any:
    """The model in plain PyTorch, at degree 1."""
    plan = tasks.plan(model, task, dtype=torch.float32, **shapes)
    return hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())


def eager(model: Path, prompts: list[list[int]], **sampling: Any) -> list[Generated]:
    return generate_eager(module_of(model, "generate", **SHAPES), prompts, NEW, piece=PIECE, **sampling)


def ask(server: ServerProcess, body: dict[str, Any]) -> dict[str, list[Any]]:
    answer = server.post("/v1/completions", {"max_tokens": NEW, "ignore_eos": True, "logprobs": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]


def alone(server: ServerProcess, bodies: list[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    return [ask(server, body) for body in bodies]


def at_once(server: ServerProcess, bodies: list[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: ask(server, body), bodies))


def check(found: list[dict[str, list[Any]]], wanted: list[Generated], model: Path) -> None:
    """The same tokens, and their probabilities."""
    tokenizer = Tokenizer.from_dir(model)
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(theirs.tokens) == NEW
        assert ours["tokens"] == [legacy_name(tokenizer.token_bytes(token)) for token in theirs.tokens]
        assert ours["token_logprobs"] == pytest.approx(theirs.logprobs, abs=1e-5)


def process_of(server: ServerProcess, degree: int) -> int:
    """That of all ranks."""
    ranks = server.get("/health").json()["ranks"]
    (pid,) = {rank["pid"] for rank in ranks}
    assert len(ranks) == degree and pid != server.process.pid
    return pid


@pytest.mark.parametrize(("family", "degree"), [("mistral", 1), ("qwen2", 4)])
def test_a_decoder_says_what_eager_says(family: str, degree: int, tmp_path: Path) -> None:
    artifact = trace_tiny(family, "generate", tmp_path, tp=degree, backend="xla", **SHAPES)
    wanted = eager(tmp_path / "model", PROMPTS, **SAMPLING)
    with real_server(artifact) as server:
        process_of(server, degree)
        for say in (alone, at_once):
            check(say(server, BODIES), wanted, tmp_path / "model")


@pytest.mark.parametrize(("family", "degree"), [("bert_classifier", 2), ("roberta", 4)])
def test_an_encoder_gives_eagers_numbers(family: str, degree: int, tmp_path: Path) -> None:
    task, output = ENCODERS[family]
    shapes: dict[str, Any] = {"batch_sizes": [4], "prompt_buckets": [8]}
    artifact = trace_tiny(family, task, tmp_path, tp=degree, backend="xla", **shapes)
    rows = [torch.tensor([ids]) for ids in prompts_of((6, 3, 8), 280, seed=3)]
    given = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        for ids in rows
    ]
    module = module_of(tmp_path / "model", task, **shapes)
    with torch.no_grad():
        wanted = torch.cat([module(*inputs.values())[output] for inputs in given])

    def numbers(inputs: dict[str, Tensor]) -> Tensor:
        body = {"inputs": {name: value.tolist() for name, value in inputs.items()}}
        answer = server.post("/v1/predict", body)
        assert answer.status_code == 200, answer.text
        return torch.tensor(answer.json()["outputs"][output]["data"])

    with real_server(artifact) as server, ThreadPoolExecutor(len(given)) as threads:
        process_of(server, degree)
        for found in (map(numbers, given), threads.map(numbers, given)):
            torch.testing.assert_close(torch.cat(list(found)), wanted, atol=1e-5, rtol=1e-5)
