"""A family in another package works on every path that ours take, without changes to this package."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nxd_infer import trainer as nxd
from nxd_infer.hugging_face import weights as hf
from nxd_infer.trace import parallel_model_trace
from nxd_infer.verify import verify_artifact
from nxd_models import registry
from nxd_models.check_family import check_family
from nxd_models.serving import tasks
from nxd_models.serving.eager_generation import generate_eager
from tests.support.e2e.command import here, nxd_infer
from tests.support.http.http_artifacts import greedy_texts
from tests.support.models.helpers import (
    FOREIGN,
    assert_greedy,
    greedy_reference,
    installed_package,
    prompts_of,
    reference,
    relative_difference,
    traced_run,
)
from tests.support.ranks import run_ranks
from tests.support.tiny_models import CHAT_TEMPLATE, EOS, write_tokenizer

EVEN = {"n_embd": 32, "n_head": 4, "vocab_size": 288}
ODD = {"n_embd": 36, "n_head": 3, "vocab_size": 287, "n_inner": 50}
"""Divides over no degree."""


@pytest.fixture(scope="module", autouse=True)
def installed():
    with installed_package(FOREIGN):
        yield


def write_gpt2(path: Path, **sizes) -> Path:
    """As transformers saves it, with large enough weights for the likeliest token to be clear, and a tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        n_layer=2, n_positions=64, bos_token_id=1, eos_token_id=EOS, pad_token_id=0, initializer_range=0.3, **sizes
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(path)
    write_tokenizer(path, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)
    return path


@pytest.fixture(scope="module")
def even(tmp_path_factory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("foreign") / "even", **EVEN)


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    return write_gpt2(tmp_path_factory.mktemp("foreign") / "odd", **ODD)


def logits_of(path: str, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return registry.load_model(path, dtype=torch.float32)(ids)


def test_the_numbers_are_those_of_transformers_also_on_two_ranks(even, odd):
    assert "gpt2" in registry.model_types()
    ids = torch.tensor(prompts_of([12, 12], 280))
    for path in (even, odd):
        with torch.no_grad():
            expected = reference(path, "CausalLM")(ids).logits
        for found in (logits_of(str(path), ids), *run_ranks(logits_of, 2, str(path), ids)):
            assert relative_difference(found, expected) < 1e-5


def test_what_is_said_of_the_family_is_so(even, odd):
    for degree in (1, 2, 4):
        check_family(even, degree)
        check_family(odd, degree)


def test_it_is_traced_verified_and_generates(odd, tmp_path, monkeypatch):
    artifact = tmp_path / "artifact"
    plan = tasks.plan(odd, batch_sizes=[2], prompt_buckets=[8], max_len=40, slots=2, lora_slots=1, speculate=2)
    prompts = prompts_of([3, 13], 280)
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=2, backend="eager", artifact_dir=artifact) as model:
        found = generate_eager(
            step, prompts, 6, piece=8, run=traced_run(model, step), bias_ids=EOS, bias_values=[[-1e9] + [0.0] * 299] * 2
        )
    for prompt, result in zip(prompts, found, strict=True):
        assert_greedy(result.tokens, *greedy_reference(odd, prompt, 6))
    assert verify_artifact(artifact, odd).failed == []
    # Whoever serves needs the artifact alone.
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].replace(str(FOREIGN), ""))
    prompt = "while the"
    done = nxd_infer("generate", artifact, prompt, "--max-tokens", 8, "--temperature", 0)
    assert done.status == 0 and greedy_texts(odd, [prompt], 8)[prompt] in done.out, done


def saved(model_dir: str, root: str) -> None:
    """A training checkpoint of the weights as they are."""
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
    model = nxd.initialize_parallel_model(config, lambda: hf.load(registry.build(model_dir), hf.weights(model_dir)))
    nxd.save_checkpoint(root, "first", model=model)


def test_an_exported_checkpoint_is_what_transformers_wrote(even, tmp_path):
    """Fused and transposed again."""
    run_ranks(saved, 2, str(even), str(tmp_path / "ckpts"), tp=2)
    out = tmp_path / "exported"
    done = here("ckpt", "export-hf", tmp_path / "ckpts", "--config", even, "--out", out)
    assert done.status == 0, done.err
    theirs, exported = load_file(even / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(exported) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(exported[name], tensor), name


def test_the_page_that_tells_how_shows_this_package():
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    shown = re.findall(r"^ *```(python|toml)\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    ours = (FOREIGN / "tiny_gpt2.py").read_text()
    points = (FOREIGN / "tiny_gpt2-1.0.dist-info/entry_points.txt").read_text().split()
    assert [kind for kind, _ in shown].count("python") >= 4
    for kind, block in shown:
        if kind == "python":
            assert textwrap.dedent(block).strip() in ours, block
        else:
            assert f'[project.entry-points."{registry.GROUP}"]' in block
            assert block.replace('"tiny', "tiny").replace('GPT2"', "GPT2").split()[-3:] == points[-3:]
