"""What docs/recipes.md shows and lists: its table of keys, its recipe, the recipes in examples."""

from __future__ import annotations

from nxd_infer.recipes.recipe import check, load
from nxd_infer.recipes.schema import Recipe
from nxd_infer.recipes.yaml_text import parse_yaml
from nxd_infer.util.options import table
from tests.support.e2e.command import ROOT

PAGE = (ROOT / "docs/recipes.md").read_text()
EXAMPLES = sorted(path.name for path in (ROOT / "examples/recipes").glob("*.yaml"))


def test_the_table_is_that_of_the_keys():
    assert PAGE.split("## Keys\n")[1].strip() == table(Recipe, "key", python=False).strip()


def test_the_example_in_the_text_is_a_recipe(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    loaded = check(parse_yaml(PAGE.split("```yaml\n")[1].split("```")[0], "page.yaml"))
    assert loaded.recipe.exp_manager.name == "my_model" and loaded.recipe.data.train_dir == "/home/me/data/train.jsonl"
    assert loaded.recipe.model.optim.lr == 3e-4 and loaded.unused == {}


def test_the_examples_are_recipes():
    assert EXAMPLES == ["dpo.yaml", "llama3_70b.yaml", "llama3_8b.yaml", "lora.yaml", "pretrain.yaml", "sft.yaml"]
    for name in EXAMPLES:
        load(ROOT / "examples/recipes" / name)
