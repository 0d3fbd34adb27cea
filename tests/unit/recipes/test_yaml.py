"""Values, references and lines of a recipe's text."""

from __future__ import annotations

import math
import os

import pytest

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.recipe import check, load, seconds_of, time_limit
from nxd_infer.recipes.resolve import override, resolve
from nxd_infer.recipes.yaml_text import Tree, parse_yaml
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
        ("a: " + "[" * 8000, "r.yaml:1: not YAML: it is nested more than 64 levels deep"),
        ("a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}]\n" for n in range(100)),
         "not YAML that is read: it is nested more than 64 levels deep"),
        ("a0: &a0 {x: 1}\n" + "".join(f"a{n + 1}: &a{n + 1} {{<<: *a{n}}}\n" for n in range(2000)) + "<<: *a2000",
         "r.yaml: not YAML that is read: too many merges (<<) lead to each other"),
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


@pytest.mark.parametrize("number", ["1099511627776", "-1099511627776000", "1e30"])
def test_a_number_that_is_too_large_is_told_the_limit(number):
    with pytest.raises(RecipeError, match=r"x.yaml:1: data.dev_choose_samples .*(below 1099511627776|at least)"):
        check(parse_yaml(f"data: {{dev_choose_samples: {number}}}\n", "x.yaml"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("1:00:00:00", 86400), ("2:30", 150), ('"00:01:00:00"', 3600), ("90", 90), ("1.5", 1.5)]
)
def test_a_time_is_of_days_hours_minutes_and_seconds(text, seconds):
    values = parsed(f"a: {text}")
    assert seconds_of(values.values["a"], values, ("a",)) == seconds


def test_a_time_has_no_weeks():
    values = parsed("a: 1:2:3:4:5")
    with pytest.raises(RecipeError, match=r"r.yaml:1: a = '1:2:3:4:5' is not a time"):
        seconds_of(values.values["a"], values, ("a",))


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
