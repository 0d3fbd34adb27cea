"""Whose module runs a directory: our family if it covers every field, else transformers'; the plan says why."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_infer.errors import ModelConfigError
from nxd_models import registry
from nxd_models.serving import tasks
from tests.support.tiny_models import write_tiny

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}


def planned(path, **options):
    return tasks.plan(path, batch_sizes=[1], prompt_buckets=[8], **options).metadata


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope_scaling": YARN}, "the RoPE type 'yarn' is not supported"),
        ({"attention_multiplier": 0.5}, "attention_multiplier = 0.5: this family does not know the field"),
        ({"hidden_act": "relu2"}, "hidden_act = 'relu2'"),
    ],
)
def test_what_our_family_does_not_cover_is_run_by_transformers(tmp_path, changes, why):
    path = write_tiny("llama", tmp_path, **changes)
    for asked in ({}, {"model_impl": "auto"}):
        found = planned(path, **asked)
        assert found["model_impl"] == "transformers" and why in found["why_transformers"]
    with pytest.raises(ModelConfigError, match=rf"config\.json: .*{why.partition(':')[0]}"):
        planned(path, model_impl="native")


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "noise at the router is not supported"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "this family does not know the field"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "the field num_experts_per_tok is missing"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7: there are 6 experts"),
    ],
)
def test_a_field_of_a_mixture_that_is_not_covered_is_named(tmp_path, family, changes, why):
    path = write_tiny(family, tmp_path)
    assert registry.load_config(path, "native").spec.model_impl is None
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelConfigError, match=why):
        registry.load_config(path, "native")


def test_what_has_no_effect_stays_with_our_family(tmp_path):
    changes = {"transformers_version": "4.40.0", "use_cache": True, "attention_dropout": 0.1, "id2label": {"0": "a"}}
    path = write_tiny("qwen2", tmp_path, **changes, max_window_layers=2, use_sliding_window=True, sliding_window=64)
    for asked in (None, "auto", "native"):
        found = planned(path, model_impl=asked, max_len=256)
        assert "model_impl" not in found and "why_transformers" not in found


def test_a_context_beyond_our_limit_is_run_by_transformers(tmp_path):
    path = write_tiny("mistral", tmp_path, sliding_window=100)
    assert "model_impl" not in planned(path, max_len=100)
    found = planned(path, max_len=200)
    assert found["model_impl"] == "transformers" and "beyond sliding_window = 100" in found["why_transformers"]
    with pytest.raises(ModelConfigError, match="beyond sliding_window = 100"):
        planned(path, max_len=200, model_impl="native")
    with pytest.raises(ModelConfigError, match="a context of 300 tokens is beyond"):
        planned(path, max_len=300)


def test_if_neither_runs_it_both_reasons_are_told(tmp_path):
    path = write_tiny("llama", tmp_path, rope_scaling={"rope_type": "spiral", "factor": 2.0}, hidden_act="nothing")
    with pytest.raises(ModelConfigError, match=r"hidden_act = 'nothing'.*in transformers' own module: "):
        planned(path)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForTokenClassification", "token-classification"),
        ("BertForQuestionAnswering", "question-answering"),
        ("BertForMaskedLM", "fill-mask"),
        ("BertForSequenceClassification", "classify"),
        ("BertModel", "embed"),
    ],
)
def test_the_task_is_that_of_the_head(tmp_path, architecture, task):
    path = write_tiny("bert", tmp_path, architectures=[architecture])
    assert planned(path)["task"] == task
    assert planned(path, task="embed")["task"] == "embed", "if it is asked to"


@pytest.mark.parametrize("architecture", ["BertForNextSentencePrediction", "BertForPreTraining"])
def test_a_head_that_is_not_served_is_refused(tmp_path, architecture):
    path = write_tiny("bert", tmp_path, architectures=[architecture])
    with pytest.raises(ModelConfigError, match=rf"\['{architecture}'\] cannot do anything by default; it can do embed"):
        planned(path)


def test_a_reward_model_of_a_directory_with_code_is_refused(tmp_path):
    path = write_tiny("qwen2", tmp_path, architectures=["Qwen2ForRewardModel"], auto_map={"AutoModel": "x.Y"})
    with pytest.raises(ModelConfigError, match="no class 'Qwen2ForRewardModel', and code of a directory is not run"):
        planned(path)


def test_a_tied_embedding_may_be_stored_as_the_head_alone(tmp_path):
    path = write_tiny("llama3", tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    expected = registry.load_model(path)(ids)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({"lm_head.weight": tensors.pop("model.embed_tokens.weight"), **tensors}, file)
    assert torch.equal(registry.load_model(path)(ids), expected)
