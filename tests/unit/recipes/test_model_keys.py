"""A key of a recipe's model changes the model that a config.json describes, or is named as one without an effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.models import raw_config
from nxd_infer.recipes.recipe import Loaded, check
from nxd_infer.recipes.yaml_text import parse_yaml
from nxd_models import registry

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = SIZES | {"model_type": "llama", "max_position_embeddings": 64}
NEOX = SIZES | {"model_type": "gpt_neox", "layer_norm_eps": 1e-5}


def loaded(folder: Path, config: dict[str, object], model: str, data: str = "{train_dir: x}") -> Loaded:
    (folder / "config.json").write_text(json.dumps(config))
    text = f"trainer: {{max_steps: 1}}\ndata: {data}\nmodel: {{model_config: {folder}/config.json{model}}}\n"
    return check(parse_yaml(text, "r.yaml"))


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        LLAMA | {"rope_theta": 1e4},
        LLAMA | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},  # of transformers 5
        NEOX | {"rotary_emb_base": 10000},
        NEOX | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}},
    ],
)
def test_the_base_and_the_epsilon_are_those_of_the_recipe(tmp_path, config):
    recipe = loaded(tmp_path, config, ", rope_theta: 500000, layernorm_epsilon: 0.5")
    found = registry.parse_config(raw_config(recipe))
    assert (found.rope.theta, found.norm_eps) == (500000, 0.5)


def test_biases_are_those_of_the_recipe(tmp_path):
    biased = loaded(tmp_path, LLAMA, ", has_bias: true")
    found = registry.parse_config(raw_config(biased))
    assert found.qkv_bias and found.output_bias and found.mlp_bias
    without = loaded(tmp_path, LLAMA, ", has_bias: true, attention_bias: false")
    found = registry.parse_config(raw_config(without))
    assert not found.qkv_bias and found.mlp_bias


def test_keys_that_the_configuration_answers_are_named(tmp_path):
    found = loaded(tmp_path, LLAMA, ", activation: gelu, normalization: layernorm, num_layers: 2")
    assert found.unused == {"model.model_config says it": ["model.activation", "model.normalization"]}
    assert not loaded(tmp_path, LLAMA, "").unused


def test_indexed_files_have_their_own_validation(tmp_path):
    with pytest.raises(RecipeError, match=r"r\.yaml:2: data\.val_dir cannot be together with data_prefix"):
        loaded(tmp_path, LLAMA, "", "{data_prefix: [x], val_dir: y}")


@pytest.mark.parametrize("value", ["-1", "often", "[1]", "true", ".nan"])
def test_an_interval_is_a_number(tmp_path, value):
    text = f"trainer: {{max_steps: 1, val_check_interval: {value}}}\ndata: {{train_dir: x}}\n"
    with pytest.raises(RecipeError, match=r"trainer\.val_check_interval must be a number of steps"):
        check(parse_yaml(text, "r.yaml"))
