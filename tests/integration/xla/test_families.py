"""Encoders behind the real server, whose replicas load an artifact's HLO; test_lowering has all families."""

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
from tests.support.http.http_artifacts import real_server, trace_tiny  # noqa: E402
from tests.support.models.helpers import prompts_of  # noqa: E402


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
