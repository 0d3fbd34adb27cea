"""neuronx_distributed_config: every documented key and default, checked, and nothing of the caller's changed."""

from __future__ import annotations

import copy
import inspect
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import NotInitializedError, ParallelConfigError
from nxd_infer.modules.lora import LoraConfig
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.trainer.config import TrainConfig
from nxd_infer.util.options import defaults, table


def test_documented_defaults_and_positions():
    config = nxd.neuronx_distributed_config()
    assert isinstance(config, dict) and json.loads(json.dumps(config)) == config
    assert config["optimizer_config"]["max_grad_norm"] == 1.0 and config["optimizer_config"]["on_nonfinite"] == "raise"
    assert not any(config["mixed_precision_config"].values())
    init = {"sequential_move_factor": 3}
    config = nxd.neuronx_distributed_config(
        1, 1, {"num_microbatches": 4}, {"zero_one_enabled": True}, "full", True, True, init, None
    )
    assert config["pipeline_config"] == {"num_microbatches": 4}
    assert config["optimizer_config"]["zero_one_enabled"] and config["optimizer_config"]["max_grad_norm"] == 1.0
    assert config["mixed_precision_config"]["use_master_weights"] is True
    assert config["activation_checkpoint_config"] == "full"
    assert config["pad_model"] and config["sequence_parallel"]
    assert config["model_init_config"]["sequential_move_factor"] == 3


def test_the_callers_dicts_are_left_alone():
    given = {"optimizer_config": {"max_grad_norm": 2.0}, "model_init_config": {}, "pipeline_config": {}}
    before = copy.deepcopy(given)
    config = nxd.neuronx_distributed_config(**given)
    config["optimizer_config"]["max_grad_norm"] = 3.0
    config["model_init_config"]["sequential_move_factor"] = 1
    config["pipeline_config"]["num_microbatches"] = 2
    assert given == before
    assert nxd.neuronx_distributed_config()["model_init_config"]["sequential_move_factor"] == 11
    assert TrainConfig(config) == config and TrainConfig.of(config) is config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_config": {"zero_1_enabled": True}}, "no key 'zero_1_enabled'; did you mean zero_one_enabled"),
        ({"pipeline_config": {"num_microbatch": 2}}, "did you mean num_microbatches"),
        ({"optimizer_config": [("zero_one_enabled", True)]}, "optimizer_config must be a dict or None, got list"),
        ({"optimizer_config": {"max_grad_norm": 0}}, "'max_grad_norm'] must be a number above 0, got 0"),
        ({"optimizer_config": {"max_grad_norm": float("nan")}}, "must be a number above 0, got nan"),
        ({"model_init_config": {"sequential_move_factor": 33}}, "must be a whole number from 1 to 32, got 33"),
        ({"model_init_config": {"param_init_fn": 3}}, "must be a function of a module, or None, got 3"),
        ({"activation_checkpoint_config": "half"}, "got 'half'"),
        ({"activation_checkpoint_config": [torch.nn.Linear, 3]}, 'must be "full", a class, several'),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a whole number of at least 1, got 0"),
        ({"tensor_parallel_size": True}, "got True"),
        ({"pad_model": 2}, "pad_model must be True or False, got 2"),
        ({"optimizer_config": {"on_nonfinite": "skp"}}, 'must be "raise" or "skip", got \'skp\'; did you mean skip?'),
        ({"lora_config": {"lora_rnk": 4}}, "lora_config has no key 'lora_rnk'; did you mean lora_rank?"),
        ({"mixed_precision_config": {"use_master_weights_in_ckpt": True}}, "needs use_master_weights=True"),
    ],
)
def test_bad_options(options: dict, message: str):
    with pytest.raises(ParallelConfigError) as raised:
        nxd.neuronx_distributed_config(**options)
    assert message in str(raised.value)


def test_what_is_set_later_is_checked_then():
    """However it is set; a copy knows its options too, and what was refused is not there."""
    config = nxd.neuronx_distributed_config()
    for one in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        options = one["optimizer_config"]
        for change in (
            lambda options=options: options.update(max_grad_norm=-1),
            lambda options=options: options.__ior__({"max_grad_norm": -1}),
            lambda one=one: one.update(optimizer_config={"max_grad_norm": -1}),
        ):
            with pytest.raises(ParallelConfigError, match="'max_grad_norm'] must be a number above 0, got -1"):
                change()
        with pytest.raises(ParallelConfigError, match="no key 'max_norm'"):
            options.setdefault("max_norm", 1.0)
        with pytest.raises(ParallelConfigError, match="needs use_master_weights=True"):
            one["mixed_precision_config"]["use_master_weights_in_ckpt"] = True
        assert one == config == nxd.neuronx_distributed_config()
        options["max_grad_norm"] = 2
        assert one.optimizer_config.max_grad_norm == 2
        options["max_grad_norm"] = 1.0


def test_python_modules_in_it_are_copied_and_pickled_by_name():
    given = {"autowrap_modules": [math], "autowrap_obj_methods": {math: ["sin"]}, "autowrap_functions": (len,)}
    config = nxd.neuronx_distributed_config(pipeline_config={**given, "pipeline_cuts": ["a"]})
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config and twin["pipeline_config"] is not config["pipeline_config"]
        assert type(twin["pipeline_config"]) is PipelineOptions


def test_one_table_says_it_all():
    """The signature, the documentation and the guides."""
    signature = inspect.signature(nxd.neuronx_distributed_config).parameters
    assert {name: one.default for name, one in signature.items()} == defaults(TrainConfig)
    assert table(TrainConfig, "option") in (nxd.neuronx_distributed_config.__doc__ or "")
    assert table(LoraConfig, "option") in (Path(__file__).parents[3] / "docs/lora.md").read_text()


def test_the_references_order_and_its_neutral_keywords():
    """Two more degrees before ``pipeline_config``, and 0 or 1 for False and True."""
    pipeline, optimizer = {"num_microbatches": 2, "deallocate_pipeline_outputs": 1}, {"zero_one_enabled": 1}
    by_place = nxd.neuronx_distributed_config(1, 1, 1, 1, pipeline, optimizer, "full", 0, 1, None, None, None, 5, 1)
    assert by_place == nxd.neuronx_distributed_config(
        1, 1, pipeline, optimizer, "full", False, True, {"sequential_move_factor": 5}, sequential_move_factor=5
    )
    assert by_place["optimizer_config"]["zero_one_enabled"] is True and by_place["sequence_parallel"] is True
    assert by_place["model_init_config"]["sequential_move_factor"] == 5
    with pytest.raises(ParallelConfigError, match="context_parallel_size must be a whole number from 1 to 1, got 2"):
        nxd.neuronx_distributed_config(1, 1, 1, 2)


def test_a_degree_without_processes():
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
    with pytest.raises(NotInitializedError, match="needs 2 processes: start them with torchrun"):
        nxd.initialize_parallel_model(config, torch.nn.Linear, 2, 2)


def test_a_pipeline_in_force_is_refused_at_once():
    """With a configuration for one stage, each stage would train the whole model."""
    config = nxd.neuronx_distributed_config()
    with use_context(make_context(2, 0, pp=2)):
        for action in (nxd.neuronx_distributed_config, lambda: nxd.initialize_parallel_model(config, nn.Linear, 2, 2)):
            with pytest.raises(ParallelConfigError, match=r"pipeline_parallel_size=1, but .* is initialised with 2"):
                action()
