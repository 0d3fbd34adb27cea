"""Each family as an artifact: traced, saved, and loaded by a process that runs it from HLO, it says what eager says.

``test_lowering`` has every family's graphs at every degree; here each has one degree, and each degree several families.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.xla.rig import require

require()

from nxd_infer.runtime.save_load import parallel_model_load, parallel_model_save  # noqa: E402
from nxd_infer.trace import parallel_model_trace  # noqa: E402
from nxd_models.hf import weights as hf  # noqa: E402
from nxd_models.serving import tasks  # noqa: E402
from nxd_models.serving.eager_generation import generate_eager  # noqa: E402
from tests.models.helpers import prompts_of, traced_run, without_mixed  # noqa: E402
from tests.tiny_models import write_tiny  # noqa: E402

PIECE, NEW = 4, 5
PROMPTS = prompts_of((3, PIECE + 2), 280, seed=30)
"""The second one needs two pieces."""
WAYS = ({}, {"temperature": [0.8, 0.0], "seed": [5, 0], "top_p": [0.9, 1.0], "presence_penalty": 0.4})
ONE_LAYER = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "degree"), [("llama", 4), ("llama3", 1), ("mistral", 2), ("qwen2", 1), ("qwen3", 2)]
)
def test_a_decoder_says_the_same_tokens(family: str, degree: int, tmp_path: Path) -> None:
    path = write_tiny(family, tmp_path / "model", **ONE_LAYER)
    shapes = {"batch_sizes": [len(PROMPTS)], "prompt_buckets": [PIECE], "max_len": 16, "dtype": torch.float32}
    plan = without_mixed(tasks.plan(path, **shapes))
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=degree, backend="xla") as traced:
        parallel_model_save(traced, tmp_path / "artifact")
    with parallel_model_load(tmp_path / "artifact", backend="xla") as model:
        found = [generate_eager(step, PROMPTS, NEW, piece=PIECE, run=traced_run(model, step), **way) for way in WAYS]
    eager = [generate_eager(step, PROMPTS, NEW, piece=PIECE, **way) for way in WAYS]
    for ours, theirs in zip(
        [row for rows in found for row in rows], [row for rows in eager for row in rows], strict=True
    ):
        assert len(ours.tokens) == NEW and ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "task", "output", "degree"),
    [
        ("bert", "embed", "embedding", 2),
        ("roberta", "embed", "embedding", 4),
        ("bert_classifier", "classify", "logits", 1),
    ],
)
def test_an_encoder_gives_the_same_numbers(family: str, task: str, output: str, degree: int, tmp_path: Path) -> None:
    path = write_tiny(family, tmp_path / "model", **ONE_LAYER)
    plan = tasks.plan(path, task, batch_sizes=[2], prompt_buckets=[8], dtype=torch.float32)
    module = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    ids = torch.tensor(prompts_of((6, 6), 280, seed=3))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=degree, backend="xla") as traced:
        parallel_model_save(traced, tmp_path / "artifact")
    with parallel_model_load(tmp_path / "artifact", backend="xla") as model, torch.no_grad():
        found, wanted = model(input_ids=ids, attention_mask=mask), module(ids, mask, torch.zeros_like(ids))
    assert list(wanted) == [output]
    torch.testing.assert_close(
        found[output] if isinstance(found, dict) else found, wanted[output], atol=1e-5, rtol=1e-5
    )
