"""Families are found by their model type: ours, those of installed packages, those that a program registers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.stored import StoredWeight
from nxd_infer.layout import AxisPlan
from nxd_models import registry
from nxd_models.bert.family import BERT
from nxd_models.check_family import check_family
from nxd_models.llama.family import LLAMA, LlamaStep
from nxd_models.serving import tasks
from nxd_models.spec import Cut, ModelSpec
from tests.support.models.helpers import install
from tests.support.tiny_models import FAMILIES, write_tiny


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A folder of packages on the path; what a test registers is forgotten after it."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(registry, "_registered", {})
    return tmp_path / "site"


LIKE_LLAMA = """
from dataclasses import replace
from nxd_models.llama.family import LLAMA
SPEC = replace(LLAMA, model_types=("nice", "nicer"))
"""


def test_a_package_adds_model_types_by_entry_points(site):
    install(site, "nice_models", {"nice": "nice_models:SPEC", "nicer": "nice_models:SPEC"}, LIKE_LLAMA)
    assert registry.model_types()[-2:] == ["nice", "nicer"]
    found = registry.find("nicer")
    assert found.model_types == ("nice", "nicer")
    assert registry.find("nice") is found
    assert registry.parse_config({**FAMILIES["llama"], "model_type": "nice"}).model_type == "nice"


def test_an_unknown_model_type_names_those_that_are_known(site):
    install(site, "nice_models", {"nice": "nice_models:SPEC"}, LIKE_LLAMA)
    known = (
        r"known are llama, mistral, .*, nice, .* transformers defines; .* entry point of the group nxd_infer\.models"
    )
    with pytest.raises(ModelConfigError, match=rf"here\.json: model_type = 'mambo'.*{known}"):
        registry.find("mambo", "here.json")
    for odd in (None, 3, [], {}):
        with pytest.raises(ModelConfigError, match="model_type"):
            registry.find(odd)


def test_two_packages_for_one_model_type_are_named(site):
    install(site, "one_models", {"nice": "one_models:SPEC", "llama": "one_models:SPEC"}, LIKE_LLAMA)
    install(site, "two_models", {"nice": "two_models:SPEC"}, LIKE_LLAMA)
    with pytest.raises(ModelConfigError, match=r"'nice' is registered more than once: .*one_models.*two_models"):
        registry.find("nice")
    with pytest.raises(ModelConfigError, match=r"'llama' is registered more than once: by nxd_infer.*one_models"):
        registry.find("llama")
    assert registry.find("qwen2") is LLAMA, "the others are not stopped"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import package_that_is_not_there", "cannot be imported: ModuleNotFoundError: .*package_that_is_not_there"),
        ("raise RuntimeError('no licence')", "cannot be imported: RuntimeError: no licence"),
        ("", "cannot be imported: AttributeError: .*SPEC"),
        ("SPEC = 3", "is a int: expected a ModelSpec with 'bad'"),
        (LIKE_LLAMA, r"is the ModelSpec\(nice, nicer\): expected a ModelSpec with 'bad'"),
    ],
)
def test_a_package_that_cannot_be_used_is_told_with_its_reason(site, source, reason):
    install(site, "bad_models", {"bad": "bad_models:SPEC"}, source)
    sys.modules.pop("bad_models", None)
    named = r"model_type = 'bad' is registered by the package bad_models \(bad_models:SPEC\), which "
    with pytest.raises(ModelConfigError, match=named + reason):
        registry.find("bad")
    assert registry.find("bert") is BERT, "the others are not stopped"
    assert "bad" in registry.model_types()


def test_a_program_registers_a_family_by_a_call(site, tmp_path):
    spec = registry.register(dataclasses.replace(LLAMA, model_types=("mine",)))
    assert registry.register(spec) is spec, "twice is once"
    path = write_tiny("llama", tmp_path / "model", model_type="mine")
    assert registry.load_config(path).spec is spec
    assert registry.load_model(path)(torch.tensor([[5, 6]])).shape == (1, 2, FAMILIES["llama"]["vocab_size"])
    for taken, owner in (("mine", r"a call of register\(\)"), ("bert", "nxd_infer itself")):
        with pytest.raises(ModelConfigError, match=rf"'{taken}' is registered already, by {owner}"):
            registry.register(dataclasses.replace(LLAMA, model_types=("new", taken)))
    assert "new" not in registry.model_types(), "none of them, where one is taken"


def test_a_spec_that_makes_no_sense_is_refused():
    with pytest.raises(ModelConfigError, match=r"tasks = \['translate'\]: expected some of generate, embed, classify"):
        dataclasses.replace(LLAMA, tasks={"translate": LLAMA.tasks["generate"]})
    with pytest.raises(ModelConfigError, match=r"stored_weights\['a.weight'\] has the checkpoint's own name"):
        dataclasses.replace(LLAMA, stored_weights={"a.weight": StoredWeight("a.weight", transposed=True)})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_our_specs_say_is_so(tmp_path, family):
    odd = {"num_attention_heads": 6, "hidden_size": 36, "intermediate_size": 50, "vocab_size": 287}
    if "num_key_value_heads" in FAMILIES[family]:
        odd |= {"num_key_value_heads": 3, "head_dim": 8}
    path = write_tiny(family, tmp_path, **odd)
    for degree in (1, 2, 4):
        check_family(path, degree)
    directory = registry.load_config(path)
    for task in directory.tasks:
        module = directory.make(task, torch.float32)
        hidden = torch.randn(2, 5, 36)
        cuts = directory.spec.pipeline_cuts(task, directory.config)
        assert len(cuts) == directory.config.num_layers - 1
        assert all(module.get_submodule(name)(hidden).shape == hidden.shape for name in cuts)


def wrong(**changes) -> ModelSpec:
    return dataclasses.replace(LLAMA, model_types=("wrong",), **changes)


def generates(**changes):
    return {"generate": dataclasses.replace(LLAMA.tasks["generate"], **changes)}


def tied_step(config, dtype, **options):
    return LlamaStep(dataclasses.replace(config, tied=True), dtype, **options)


def planned(**changes):
    return lambda config, degree: {**LLAMA.tensor_parallel_plan(config, degree), **changes}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (wrong(tensor_parallel_plan=lambda config, degree: {}), "model.embed_tokens is cut as .* says {}"),
        (wrong(tensor_parallel_plan=planned(lm_head=Cut(1, AxisPlan.padded(288)))), "lm_head is cut as"),
        (
            wrong(tensor_parallel_plan=planned(gone=Cut(0, AxisPlan.padded(8)))),
            r"layers that are not there: \['gone'\]",
        ),
        (wrong(tasks=generates(blocks="model.h")), "blocks = 'model.h' is not a module list of num_layers = 2"),
        (wrong(tasks=generates(step=tied_step)), r"differ in the weights \['lm_head.weight'\]"),
    ],
)
def test_a_spec_that_is_not_so_is_found(site, tmp_path, spec, message):
    registry.register(spec)
    path = write_tiny("llama", tmp_path / "model", model_type="wrong")
    with pytest.raises(ModelConfigError, match=message):
        check_family(path)


def test_adapters_beside_the_layers_that_a_family_names(site, tmp_path):
    path = write_tiny("llama", tmp_path / "model")
    assert tasks.plan(path, lora_slots=1).metadata["lora"]["targets"] == list(LLAMA.adapter_targets)
    registry.register(wrong(adapter_targets=()))
    (path / "config.json").write_text(json.dumps({**FAMILIES["llama"], "model_type": "wrong"}))
    with pytest.raises(ModelConfigError, match="names no layers that adapters may change; give lora_targets"):
        tasks.plan(path, lora_slots=1)
    assert tasks.plan(path, lora_slots=1, lora_targets=["q_proj"]).metadata["lora"]["targets"] == ["q_proj"]
