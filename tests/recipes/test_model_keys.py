"""A key of a recipe's model changes the model that a config.json describes, or is named as one without an effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.recipe import Loaded, check
from nxd_infer.recipes.yaml_text import parse_yaml

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = SIZES | {"model_type": "llama", "max_position_embeddings": 64}
NEOX = SIZES | {"model_type": "gpt_neox", "layer_norm_eps": 1e-5}


def loaded(folder: Path, config: dict[str, object], model: str, data: str = "{train_dir: x}") -> Loaded:
    (folder / "config.json").write_text(json.dumps(config))
    text = f"trainer: {{max_steps: 1}}\ndata: {data}\nmodel: {{model_config: {folder}/config.json{model}}}\n"
    return check(parse_yaml(text, "r.yaml"))


@pytest.mark.check
def test_indexed_files_have_their_own_validation(tmp_path):
    with pytest.raises(RecipeError, match=r"r\.yaml:2: data\.val_dir cannot be together with data_prefix"):
        loaded(tmp_path, LLAMA, "", "{data_prefix: [x], val_dir: y}")


@pytest.mark.check
@pytest.mark.parametrize("value", ["-1", "often", "[1]", "true", ".nan"])
def test_an_interval_is_a_number(tmp_path, value):
    text = f"trainer: {{max_steps: 1, val_check_interval: {value}}}\ndata: {{train_dir: x}}\n"
    with pytest.raises(RecipeError, match=r"trainer\.val_check_interval must be a number of steps"):
        check(parse_yaml(text, "r.yaml"))
