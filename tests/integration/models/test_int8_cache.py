"""Keys and values in eight bits: half the bytes, an error that verify shows, answers that no batch changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from nxd_infer.backends import registry
from nxd_infer.errors import ModelConfigError
from nxd_infer.trace import load_artifact
from nxd_infer.verify import verify_artifact
from nxd_models.serving import tasks
from nxd_server import LLM, SamplingParams
from tests.support.e2e.command import here
from tests.support.engine.real_artifacts import costs_of, prompt_of, reference_generate, trace_llama
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = GREEDY.replace(temperature=1.0, seed=5)
PROMPTS = [prompt_of(length) for length in (3, 9, 17, 40, 60, 7)]


@pytest.fixture(scope="module", params=[(1, None), (2, None), (1, "transformers")], ids=["tp1", "tp2", "generic"])
def traced(request):
    tp, library = request.param
    return trace_llama(tp, kv_cache_dtype="int8", model_impl=library)


def test_the_cache_takes_a_byte_a_number_and_four_a_scale(traced):
    states = {spec.name: spec for spec in load_artifact(traced[1]).manifest.states}
    plain = {spec.name: spec for spec in load_artifact(trace_llama(1)[1]).manifest.states}
    width = plain["k_cache.0"].shape[-1]
    for name in ("k_cache.0", "v_cache.0"):
        assert states[name].dtype == "int8" and states[name].shape[-1] == width + 4


def test_verify_shows_what_eight_bits_lose(traced):
    result = verify_artifact(traced[1], traced[0])
    assert not result.failed and result.tolerance == 3e-2
    assert all(1e-5 < row.difference < 3e-2 for row in result.rows), result.rows
    text = " ".join(here("verify", traced[1], traced[0]).out.split())
    assert "its keys and values are int8" in text


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_do_not_depend_on_the_batch_and_are_close_to_the_models(traced, params):
    model_dir, artifact = traced
    with LLM(artifact, costs=costs_of(artifact), prefix_caching=False) as llm:
        together = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params)]
        alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert together == alone
    if params is GREEDY:
        wanted = reference_generate(model_dir, PROMPTS, 1)
        first = [(tokens[0], right) for tokens, (right, gap) in zip(alone, wanted, strict=True) if gap > 0.05]
        assert first and all(token == right[0] for token, right in first)


def test_models_without_a_cache_of_ours_are_refused(tmp_path):
    tiny: Any = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB_SIZE}
    tiny["decoder_start_token_id"] = 0
    transformers.T5ForConditionalGeneration(transformers.T5Config(**tiny)).save_pretrained(tmp_path / "t5")
    for model, task in ((write_tiny("bert", tmp_path / "bert"), "embed"), (tmp_path / "t5", "generate")):
        with pytest.raises(ModelConfigError, match=r"kv_cache_dtype = 'int8'.* leave it out"):
            tasks.plan(model, task, kv_cache_dtype="int8", dtype=torch.float32)
    with pytest.raises(ModelConfigError, match="kv_cache_dtype"):
        tasks.plan(write_tiny("llama", tmp_path / "llama"), kv_cache_dtype="int3")


def test_a_backend_that_cannot_read_it_is_refused_before_anything_is_traced(tmp_path, monkeypatch):
    monkeypatch.setattr(registry.get("cpu"), "native", False)
    model = write_tiny("llama", tmp_path / "llama")
    done = here("trace", model, "--out", tmp_path / "out", "--kv-cache-dtype", "int8", "--backend", "cpu")
    assert done.status == 1 and "kv_cache_dtype = 'int8'" in done.err and not (tmp_path / "out").exists()
