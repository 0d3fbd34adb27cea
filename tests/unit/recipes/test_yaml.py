"""Values, references and lines of a recipe's text; the keys of its model change that of a config.json."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.models import raw_config
from nxd_infer.recipes.recipe import Loaded, check, load, seconds_of, time_limit
from nxd_infer.recipes.resolve import override, resolve
from nxd_infer.recipes.yaml_text import Tree, parse_yaml
from nxd_models import registry
from tests.support.recipes.jobs import write


def parsed(text: str, *overrides: str) -> Tree:
    tree = parse_yaml(text, "r.yaml")
    override(tree, overrides)
    resolve(tree)
    return tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5e1", 5.0),
        ("1e", "1e"),
        ("980,10,10", "980,10,10"),
        ("1:00:00:00", "1:00:00:00"),
        ("1:30.5", "1:30.5"),
        ("0x1F", 31),
        ("-1_000", -1000),
        ("1.5", 1.5),
        ("~", None),
    ],
)
def test_a_number_is_a_number(text, value):
    found = parsed(f"a: {text}").values["a"]
    assert found == value and type(found) is type(value)


def test_references_keep_types_and_may_be_relative_and_nested(monkeypatch):
    monkeypatch.setenv("PLACE", "/data")
    tree = parsed(
        "a: {b: 3, c: '${.b}', d: '${a.c}x'}\n"
        "e: '${multiply:${a.b}, ${add:1, 1}}'\n"
        "f: [$PLACE/x, '${PLACE}/y', '${oc.env:NOT_THERE,z}', $$5, '${a}']\n"
        "g: '${f.0}'\n"
        "h: '${divide:${e}, 4}'\n"
        "i: '${stdlib:json/__init__.py}'\n"
    ).values
    assert tree["a"] == {"b": 3, "c": 3, "d": "3x"}
    assert tree["e"] == 6 and tree["g"] == "/data/x" and tree["h"] == 1.5
    assert tree["f"] == ["/data/x", "/data/y", "z", "$5", tree["a"]]
    assert os.path.samefile(tree["i"], __import__("json").__file__)


def test_a_section_can_be_merged_into_another():
    tree = parsed("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\nc: {<<: [*a, {z: 4}]}")
    assert tree.values == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2, "z": 4}}
    assert tree.where(("b", "y")) == "r.yaml:4"


def test_overrides_are_values_of_yaml_and_make_sections():
    tree = parsed("a: {b: 1}\nd: 2", "a.b=3e-4", "+a.c.d=[1, x]", "~d", "e=true")
    assert tree.values == {"a": {"b": 3e-4, "c": {"d": [1, "x"]}}, "e": True}
    assert tree.where(("a", "b")) == "command line" and tree.where(("a", "z")) == "r.yaml:1"


def repeated(line: str, reference: str, between: str = ", ") -> str:
    lines = [f"a0: {line.format(0, 'x' * 10)}"]
    lines += [f"a{n}: {line.format(n, between.join([reference.format(n - 1)] * 10))}" for n in range(1, 9)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1}\na: 2", "r.yaml:3: a is given twice, first in line 1; remove one"),
        ("a: '${b}'\nb: '${a}'", "r.yaml:1: a refers to itself: a -> b -> a"),
        ("x: {learning: 1}\na: '${x.learnin}'",
         "r.yaml:2: a refers to 'x.learnin', which is not there; the nearest is x.learning"),
        ("a: $NOT_THERE_AT_ALL", "r.yaml:1: a needs the environment variable NOT_THERE_AT_ALL, which is not set"),
        ("a: '${multipli:1, 2}'", "the nearest is multiply"),
        ("a: '${b'", "has a '${' without its '}'"),
        ("a: [1", "r.yaml:1: not YAML"),
        ("- 1", "r.yaml:1: a recipe is a mapping of sections"),
        ("", "r.yaml is empty"),
        ("a: &x [*x]", "contains itself"),
        ("a: " + "[" * 8000, "r.yaml: it is nested too deeply"),
        ("b: 1\na: 2024-99-99", "r.yaml:2: '2024-99-99' is not a value of YAML"),
        ("a: x\x01", "r.yaml: not YAML: special characters are not allowed"),
        ("a: '${divide:.nan, 1}'", "r.yaml:1: a divide of ['.nan', '1'] is not a number"),
        (repeated("&a{0} [{1}]", "*a{0}"), "a recipe has at most 100000 values, those of its aliases included"),
        (repeated("'{1}'", "${{a{0}}}", ""), "has more than 1048576 characters by its references"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_line(text, message):
    with pytest.raises(RecipeError) as told:
        parsed(text)
    assert message in str(told.value)


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", "a.b.c=1"])
def test_a_wrong_override_is_shown(text):
    with pytest.raises(RecipeError, match="command line"):
        parsed("a: {b: 1}", text)


def test_a_number_that_is_too_large_is_told_the_limit():
    with pytest.raises(RecipeError, match=r"x.yaml:1: data.dev_choose_samples must be .* from 1 to 1099511627776, got"):
        check(parse_yaml("data: {dev_choose_samples: 1e30}\n", "x.yaml"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("1:00:00:00", 86400), ("2:30", 150), ('"00:01:00:00"', 3600), ("90", 90), ("1.5", 1.5)]
)
def test_a_time_is_of_days_hours_minutes_and_seconds(text, seconds):
    values = parsed(f"a: {text}\nb: 1:2:3:4:5")
    assert seconds_of(values.values["a"], values, "a") == seconds
    with pytest.raises(RecipeError, match=r"r.yaml:2: b = '1:2:3:4:5' is not a time"):
        seconds_of(values.values["b"], values, "b")


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ([], math.inf),
        (["trainer.max_time=0"], 0),
        (["exp_manager.max_time_per_run='00:00:00:00'", "trainer.max_time=9"], 0),
        (["exp_manager.max_time_per_run=10", "trainer.max_time=9"], 9),
    ],
)
def test_the_shorter_time_is_the_limit(tmp_path, overrides, seconds):
    assert time_limit(load(write(tmp_path), overrides)) == seconds


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
