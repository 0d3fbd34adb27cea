"""Adapted models: what is trained, saved and merged; files that do not fit."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import nxd_infer as nxd
from nxd_infer.errors import CheckpointError, ParallelConfigError, WeightMismatchError
from nxd_infer.modules.lora import LoraConfig, LoRAModel, load_adapter
from nxd_infer.modules.lora.peft import collect_adapter, read_config, write_adapter
from tests.support.modules.lora import ALL, MERGED, batch, lora, net
from tests.support.parallel_layers.compare import error


def test_targets_are_words_in_names():
    assert set(lora(target_modules=["proj"]).lora_layers) == {"qkv", "out_proj", "up_proj", "down_proj"}
    assert lora(target_modules=["q_proj", "v_proj"]).lora_layers["qkv"].parts == ("q", "v")
    assert set(lora(target_modules=r"(up|down)_proj").lora_layers) == {"up_proj", "down_proj"}
    assert set(lora(target_modules=["e"], modules_to_save=["head"]).lora_layers) == {"embed"}
    with pytest.raises(ParallelConfigError, match=r"\['nothing'\].*down_proj, embed, head"):
        lora(target_modules=["nothing"])
    with pytest.raises(ParallelConfigError, match="no default target_modules for the model type None"):
        lora(target_modules=None)
    with pytest.raises(ParallelConfigError, match="modules_to_save matches no module: tail"):
        lora(modules_to_save=["tail"])
    with pytest.raises(ParallelConfigError, match="already has LoRA layers"):
        LoRAModel(lora().module, LoraConfig(target_modules=ALL))
    model = net()
    model.config = type("Config", (), {"model_type": "llama"})()  # pyright: ignore
    assert LoRAModel(model, LoraConfig()).lora_layers["qkv"].parts == ("q", "v")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 0}, "lora_rank must be a whole number of at least 1, got 0"),
        ({"lora_alpha": -1}, "lora_alpha must be a number above 0"),
        ({"lora_dropout": 1.0}, "lora_dropout must be a number from 0 to below 1"),
        ({"bias": "some"}, 'bias must be "none", "all" or "lora_only"'),
        ({"init_lora_weights": "ones"}, '"default" or "gaussian"'),
        ({"target_modules": [1]}, "target_modules must be a list of names"),
        ({"use_rslora": 1}, "use_rslora must be True or False"),
        ({"merge_lora": True}, "pass save_lora_base=True"),
        ({"enable_lora": 16}, "enable_lora must be True or False (the rank is lora_rank=), got 16"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str):
    with pytest.raises(ParallelConfigError, match=re.escape(message)):
        LoraConfig(**options)
    with pytest.raises(ParallelConfigError, match="has no key 'rank'"):
        nxd.neuronx_distributed_config(lora_config={"rank": 4})


def test_what_is_adapted_is_printed(capsys: pytest.CaptureFixture[str]):
    lora(target_modules=["q_proj", "head"], lora_verbose=True)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "LoRA on 2 projections: q_proj, head"
    factors = 3 * (8 + 8) + 3 * (8 + 5)
    assert second == f"trained: {factors} of {sum(p.numel() for p in net().parameters()) + factors} parameters"


def test_scaling_and_initial_values():
    assert LoraConfig(lora_rank=16, lora_alpha=8).scaling == 0.5
    assert LoraConfig(lora_rank=16, lora_alpha=8, use_rslora=True).scaling == 2
    assert torch.equal(lora(filled=False)(batch()["ids"]), net()(batch()["ids"]))
    torch.manual_seed(0)
    options = {"lora_rank": 64, "target_modules": ["0"], "init_lora_weights": "gaussian"}
    factor = LoRAModel(nn.Sequential(nn.Linear(64, 64)), LoraConfig(**options)).get_parameter("0.lora_A.weight")
    assert abs(factor.std().item() * 64 - 1) < 0.05


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_only_what_is_named_is_trained(bias: str):
    model = lora(filled=False, target_modules=["up_proj"], bias=bias, modules_to_save=["head"])
    wanted = {"up_proj.lora_A.weight", "up_proj.lora_B.weight", "head.weight", "head.bias"}
    if bias != "none":
        wanted.add("up_proj.base_layer.bias")
    if bias == "all":
        wanted |= {"norm.bias", "qkv.bias_qkv", "out_proj.bias", "down_proj.bias"}
    assert {name for name, param in model.named_parameters() if param.requires_grad} == wanted
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # in the first step A has no gradient, because B is zero
        model(**batch()).backward()
        optimizer.step()
    changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert changed == wanted
    assert set(model.state_dict()) == wanted


def test_the_three_ways_to_save():
    plain, adapter = set(net().state_dict()), lora().adapter_names
    full = {name.replace(".", ".base_layer.", 1) if not name.startswith("norm") else name for name in plain}
    assert set(lora().state_dict()) == adapter
    assert set(lora(save_lora_base=True).state_dict()) == adapter | full
    merged = lora(**MERGED)
    assert set(merged.state_dict()) == plain
    trained, ids = lora(), batch()["ids"]
    expected = trained(ids).detach()

    other = lora(filled=False)  # the adapter alone, over the same base
    other.load_state_dict(trained.state_dict())
    assert torch.equal(other(ids), expected)
    trained.lora_config.save_lora_base = True
    other = lora(seed=1, filled=False)  # both, over another base
    other.load_state_dict(trained.state_dict())
    assert torch.equal(other(ids), expected)
    trained.lora_config.merge_lora = True
    other = net(seed=1)  # merged, into a model that knows nothing of adapters
    other.load_state_dict(trained.state_dict())
    assert error(other(ids).detach(), expected) < 1e-5


def test_the_configuration_may_lie_in_the_state_dict():
    model = lora(save_lora_config_adapter=True)
    state = model.state_dict()
    assert LoraConfig.of(state["lora_config"]) == model.lora_config
    lora(filled=False).load_state_dict(state)
    assert json.loads(json.dumps(state["lora_config"]))["lora_rank"] == 3


def test_the_configuration_lies_where_it_was_written_last(tmp_path: Path):
    for apart, rank in ((True, 2), (False, 3), (True, 4)):
        tensors, config = collect_adapter(lora(lora_rank=rank))
        write_adapter(tmp_path, tensors, config, apart)
        assert read_config(tmp_path, LoraConfig()).lora_rank == rank


def test_a_state_dict_that_does_not_fit_is_refused():
    model = lora()
    state = model.state_dict()
    with pytest.raises(WeightMismatchError) as raised:
        model.load_state_dict({**state, "other": torch.ones(1)})
    assert raised.value.unexpected == ("other",)
    lost = state.pop("head.lora_B.weight")
    with pytest.raises(WeightMismatchError) as raised:
        model.load_state_dict(state)
    assert raised.value.missing == ("head.lora_B.weight",)
    model.load_state_dict(state, strict=False)
    with pytest.raises(ParallelConfigError, match="call unmerge"):
        model.merge().load_state_dict({**state, "head.lora_B.weight": lost})


def test_merged_equals_unmerged_and_unmerging_is_exact():
    model, ids = lora(dtype=torch.bfloat16, save_lora_base=True).eval(), batch()["ids"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(ids).detach()
    assert error(model.merge()(ids).detach().float(), expected.float()) < 0.1
    assert not torch.equal(model.merge()(ids), expected)  # twice is once
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ParallelConfigError, match=r"call unmerge\(\) first"):
        model.train()(ids)
    assert torch.equal(model.eval().unmerge()(ids), expected)
    copy = pickle.loads(pickle.dumps(model))
    assert torch.equal(copy(ids), expected)
    wide = lora().eval()
    expected = wide(ids).detach()
    assert error(wide.merge()(ids).detach(), expected) < 1e-5


def test_files_that_do_not_fit_are_refused(tmp_path: Path):
    model = lora()
    model.save_adapter(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "base_model.model.q_proj.lora_A.weight" in tensors and config["peft_type"] == "LORA"
    assert tensors["base_model.model.embed.lora_embedding_A"].shape == (3, 10)
    load_adapter(lora(filled=False), tmp_path)
    with pytest.raises(CheckpointError, match=r"scaling is 2\.66.*, the model's is 4\.0"):
        load_adapter(lora(lora_rank=2), tmp_path)
    with pytest.raises(ParallelConfigError, match="call unmerge"):
        load_adapter(lora().merge(), tmp_path)
    lost = "base_model.model.q_proj.lora_A.weight"
    broken = {name: value for name, value in tensors.items() if name != lost}
    broken |= {"base_model.model.head.lora_A.weight": torch.zeros(3, 9), "more": torch.zeros(1)}
    save_file(broken, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightMismatchError) as raised:
        load_adapter(model, tmp_path)
    assert raised.value.missing == (lost,) and raised.value.unexpected == ("more",)
    assert raised.value.mismatched == (("base_model.model.head.lora_A.weight", (3, 9), (3, 8)),)
    for change, message in (
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "uses use_dora"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changed the base weights"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=message):
            load_adapter(model, tmp_path)
    with pytest.raises(CheckpointError, match="has no adapter"):
        load_adapter(model, tmp_path / "nowhere")
