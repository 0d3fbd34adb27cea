"""Checkpoints in the shapes people have them: shards, prefixes, old names, pickles, damage."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.hugging_face import weights as hf
from nxd_models import registry
from tests.support.tiny_models import write_tiny


def same_parameters(a, b):
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    return all(torch.equal(left[k], right[k]) for k in left)


def rewrite(path, rename):
    tensors = load_file(path / "model.safetensors")
    save_file({rename(k): v for k, v in tensors.items()}, path / "model.safetensors")


def test_shards_and_prefixes_are_resolved(tmp_path):
    whole = registry.load_model(write_tiny("llama", tmp_path / "whole"))
    sharded = write_tiny("llama", tmp_path / "sharded")
    tensors, table = load_file(sharded / "model.safetensors"), {}
    (sharded / "model.safetensors").unlink()
    for number in range(3):
        part = dict(list(tensors.items())[number::3])
        table |= dict.fromkeys(part, f"model-{number}.safetensors")
        save_file(part, sharded / f"model-{number}.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    assert same_parameters(whole, registry.load_model(sharded))
    (sharded / "model.safetensors.index.json").unlink()
    assert same_parameters(whole, registry.load_model(sharded)), "shards without their index"
    bare = write_tiny("llama", tmp_path / "bare")
    rewrite(bare, lambda k: k.removeprefix("model."))
    assert same_parameters(whole, registry.load_model(bare)), "saved from the base model"

    bert = registry.load_model(write_tiny("bert", tmp_path / "bert"))
    prefixed = write_tiny("bert", tmp_path / "prefixed")
    rewrite(prefixed, lambda k: "bert." + k)
    assert same_parameters(bert, registry.load_model(prefixed)), "saved with a head"
    old = write_tiny("bert", tmp_path / "old")
    rewrite(old, lambda k: k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"))
    assert same_parameters(bert, registry.load_model(old)), "the names of the first checkpoints"


def test_what_a_model_does_not_read_is_ignored(tmp_path):
    path = write_tiny("llama3", tmp_path)
    expected = registry.load_model(path)
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    unread = {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors, **unread}, path / "model.safetensors")
    assert same_parameters(expected, registry.load_model(path))
    named = hf.named_weights(registry.build(path), registry.weights(path))
    assert set(named.keys()) == set(expected.state_dict())


def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("nxd_infer.hugging_face.tied_head.PIECE", 1000)  # so that the last of several pieces differs
    path = write_tiny("llama3", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(WeightMismatchError, match=r"tie_word_embeddings = true.*'lm_head.weight'.*set it to false"):
        registry.load_model(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert torch.equal(registry.load_model(path).lm_head.weight, tensors["lm_head.weight"])


def test_pickles_are_refused(tmp_path):
    path = write_tiny("llama", tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*safe_serialization=True"):
        registry.weights(path)


def test_loading_converts_to_the_dtype_of_the_module(tmp_path):
    path = write_tiny("qwen3", tmp_path)
    model = registry.load_model(path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = load_file(path / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].to(torch.bfloat16)), name
        assert parameter.requires_grad


def test_tied_parameters_stay_one_when_a_meta_model_is_loaded():
    """Two parameters over one memory would each be stepped by an optimizer."""
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"a": torch.nn.Embedding(4, 3), "b": torch.nn.Linear(3, 4, bias=False)})
        model["b"].weight = model["a"].weight
    table = torch.randn(4, 3)
    hf.load(model, {"a.weight": table})
    assert model["a"].weight is model["b"].weight
    assert torch.equal(model["a"].weight, table)
