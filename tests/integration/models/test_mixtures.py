"""Mixtral and Qwen3-MoE as a user has them: traced, verified, served, with the tokens of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nxd_infer.hugging_face.weights import named_weights
from nxd_infer.runtime.load import load_artifact
from nxd_infer.trace import parallel_model_load, parallel_model_save
from nxd_models import registry
from nxd_models.serving import tasks
from nxd_server import LLM, SamplingParams
from tests.support.e2e.command import here
from tests.support.models.helpers import assert_greedy, greedy_reference, prompts_of
from tests.support.needs import needs_native
from tests.support.tiny_models import MIXTURES, write_tiny

pytestmark = needs_native
NEW = 6


def traced(path: Path, out: Path, *options: object) -> Path:
    sizes = ("--dtype", "float32", "--batch-sizes", "4", "--prompt-buckets", "16", "--max-len", 40)
    done = here("trace", path, "--out", out, *sizes, "--compiler-args", "nxd_packed=1", *options)
    assert done.status == 0, done.err
    return out


def answers(artifact: Path, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, logit_bias={2: -100.0})
    with LLM(artifact) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@pytest.mark.smoke
@pytest.mark.parametrize(("family", "degree"), [("mixtral", 1), ("qwen3_moe", 2)])
def test_it_is_traced_verified_and_served(tmp_path: Path, family: str, degree: int) -> None:
    path = write_tiny(family, tmp_path / "model")
    artifact = traced(path, tmp_path / "artifact", "--tp", degree)
    packed = {spec.name for spec in load_artifact(artifact).manifest.weights if spec.encoding}
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"} <= packed
    done = here("verify", artifact, path)
    assert done.status == 0, done.out + done.err
    prompts = prompts_of((1, 15, 16, 17, 33), 280, seed=3)
    for prompt, tokens in zip(prompts, answers(artifact, prompts), strict=True):
        assert_greedy(tokens, *greedy_reference(path, prompt, NEW))


@pytest.mark.parametrize("family", MIXTURES)
def test_in_eight_bits_it_verifies_and_its_logits_are_near(tmp_path: Path, family: str) -> None:
    path = write_tiny(family, tmp_path / "model")
    artifact = traced(path, tmp_path / "artifact", "--quantize", "int8")
    done = here("verify", artifact, path)
    assert done.status == 0 and "rounded to int8" in done.out, done.out + done.err
    (prompt,) = prompts_of((12,), 280)
    model = registry.load_model(path)
    (tokens,) = answers(artifact, [prompt])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
    best = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(best.max()) < 0.1 * float(logits.std()), best


def test_new_weights_are_packed_anew(tmp_path: Path) -> None:
    path, other = (write_tiny("mixtral", tmp_path / str(seed), seed=seed, num_hidden_layers=1) for seed in (0, 7))
    artifact = traced(path, tmp_path / "artifact", "--quantize", "int8")
    with parallel_model_load(artifact) as model:
        model.update_weights(named_weights(registry.build(other), registry.weights(other)))
        parallel_model_save(model, tmp_path / "saved")
    assert [here("verify", tmp_path / "saved", one).status for one in (path, other)] == [1, 0]


def test_two_stages_of_two_ranks(tmp_path: Path) -> None:
    path = write_tiny("qwen3_moe", tmp_path / "model")
    artifact = traced(path, tmp_path / "artifact", "--tp", 2, "--pp", 2)
    done = here("verify", artifact, path)
    assert done.status == 0 and re.search(r"tp 2, pp 2", done.out), done.out + done.err


def test_rows_without_a_token_read_no_expert(tmp_path: Path) -> None:
    """Else every slot without a request would cost a decode step the experts of whatever its row holds."""
    path = write_tiny("mixtral", tmp_path / "model", num_hidden_layers=1)
    plan = tasks.plan(path, batch_sizes=[4], prompt_buckets=[16], max_len=40, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    step = plan.func(**plan.func_kwargs)
    step.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    for name, inputs in zip(plan.bucket_names, plan.example_inputs, strict=True):
        length = torch.zeros_like(inputs["length"])
        length[-1] = 1
        step(**{**inputs, "length": length})
        rows = seen.pop().view(*inputs["tokens"].shape, -1)
        live = torch.zeros(inputs["tokens"].shape, dtype=torch.bool)
        live[-1, 0] = True
        assert bool((rows[live] >= 0).all()) and bool((rows[~live] == -1).all()), name
