"""The HLO lint: every rule is red on a module that breaks it, and none on what our graphs hold."""

from __future__ import annotations

import json

import pytest

from nxd_infer.backends.hlo.module import Module
from nxd_infer.backends.neuron import lint
from nxd_infer.errors import TraceError
from tests.support.neuron.hlo_samples import FOLDER, stored

TYPES = "types of NeuronCore-v2"
BREAKING = {
    "float64": (TYPES, "NeuronCore-v2 has no F64"),
    "int8": (TYPES, "NeuronCore-v2 has no S8"),
    "complex64": (TYPES, "NeuronCore-v2 has no C64"),
    "topk_int32": ("NCC_EVRF013", "top-k, or a sort, of S32"),
    "sort_int64": ("NCC_EVRF013", "top-k, or a sort, of S64"),
    "shift_int64": ("NCC_EVRF022", "an arithmetic right shift of S64"),
    "scatter_add_int32": ("NCC_EVRF016, NCC_EVRF060", "a scatter that adds S32"),
    "all_reduce_int32": ("NCC_EVRF061, NCC_EVRF063", "all-reduce of S32"),
    "reduce_scatter_int32": ("NCC_EVRF061, NCC_EVRF063", "reduce-scatter of S32"),
    "matmul_int32": ("NCC_EVRF035", "a matrix product of S32"),
    "constant_64_bits": ("NCC_ESFH002", "the constant 1099511627776 needs 64 bits"),
    "gather_outside": ("NCC_EVRF031, NCC_EVRF056", "5 to 11 of dimension 0, which ends at 7"),
    "scatter_outside": ("NCC_EVRF031, NCC_EVRF056", "5 to 11 of dimension 0, which ends at 7"),
    "reads_old": (lint.ALIAS, "parameter 0 is read for something else than its new value"),
}
SOUND = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem not in BREAKING)
ALIASES = {"reads_old": {1: 0}, "reads_new": {1: 2}, "reads_for_nothing": {1: 1}}


def findings(name: str) -> list[lint.Finding]:
    module = Module(stored(name))
    aliases = ALIASES.get(name, {})
    for parameter in aliases.values():
        assert module.entry.parameters()[parameter].shape == [4, 3], "that is the state"
    return lint.findings(module, aliases)


@pytest.mark.parametrize("name", BREAKING)
def test_a_broken_limit_is_found_by_its_rule_alone(name: str) -> None:
    rule, text = BREAKING[name]
    found = findings(name)
    assert {each.rule for each in found} == {rule}
    assert text in str(found[0])


@pytest.mark.parametrize("name", SOUND)
def test_what_breaks_none_is_let_through(name: str) -> None:
    assert findings(name) == []


def test_every_rule_has_a_module_that_breaks_it() -> None:
    assert {rule for rule, _ in BREAKING.values()} == {*lint.RULES, lint.ALIAS}


def test_an_instruction_that_nothing_is_made_of_breaks_nothing() -> None:
    """torch_xla leaves one where a view of all of a state is written: it reads the state, and nobody reads it."""
    text = json.loads(stored("reads_for_nothing"))
    (entry,) = [each for each in text["computations"] if each["id"] == text["entryComputationId"]]
    used = {number for each in entry["instructions"] for number in each.get("operandIds", [])} | {entry["rootId"]}
    dead = [each for each in entry["instructions"] if each["id"] not in used and each.get("operandIds")]
    assert dead and findings("reads_for_nothing") == []


def test_without_an_alias_the_old_state_may_be_read() -> None:
    assert lint.findings(Module(stored("reads_old")), {}) == []


def test_a_number_of_float64_counts_where_something_is_computed_in_it() -> None:
    assert '"F64"' in stored("number_of_float64") and findings("number_of_float64") == []


def test_the_error_names_every_rule_and_place() -> None:
    with pytest.raises(TraceError, match=r"(?s)cannot run on a NeuronCore.*at convert\.\d+: NeuronCore-v2 has no F64"):
        lint.check(Module(stored("float64")), {})
