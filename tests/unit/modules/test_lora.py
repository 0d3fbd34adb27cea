"""Adapted models: what is trained and saved, files that do not fit; merged weights, which contain the adapter."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.distributed.replace import ColumnParallelConv1D, RowParallelConv1D, ScaledParallelEmbedding
from nxd_infer.errors import CheckpointError, LoraTargetError, ParallelConfigError, WeightMismatchError
from nxd_infer.layout import load_weights
from nxd_infer.layout.sources import as_source
from nxd_infer.modules.lora import LoraConfig, LoRAModel, load_adapter
from nxd_infer.trainer import gather_weights
from tests.support.modules.lora import ALL, IDS, MERGED, Net, Pair, Shared, adapted, batch, lora, net
from tests.support.parallel_layers.compare import error
from tests.support.trainer.jobs import train
from tests.support.trainer.models import decoder, tokens


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


def test_the_configuration_may_lie_in_the_state_dict():
    model = lora(save_lora_config_adapter=True)
    state = model.state_dict()
    assert LoraConfig.of(state["lora_config"]) == model.lora_config
    lora(filled=False).load_state_dict(state)
    assert json.loads(json.dumps(state["lora_config"]))["lora_rank"] == 3


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
    once = model(ids).detach()
    assert torch.equal(model.merge()(ids), once) and not torch.equal(once, expected)
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


def job(**options: Any) -> tuple[Any, Any]:
    config = nxd.neuronx_distributed_config(lora_config={"lora_rank": 3, "target_modules": ALL, **options})
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(config, Net)
    return model, nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=5e-2)


def trained(model: Any, optimizer: Any) -> float:
    train(model, optimizer, batch(), 3)
    return loss(model)


def loss(model: Any) -> float:
    return float(model.run_eval(**batch()))


def test_a_merged_checkpoint_does_not_count_the_adapter_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model, optimizer = job(**MERGED)
    saved = pytest.approx(trained(model, optimizer), rel=1e-5)
    nxd.save_checkpoint(tmp_path, "best", model, optimizer)
    started, _ = job(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path), lora_load_tag="best")
    assert loss(started) == saved
    nxd.load_checkpoint(tmp_path, "best", started)
    assert loss(started) == saved
    assert "the weights contain an adapter" in caplog.text
    assert trained(model, optimizer) < loss(started) * 0.99
    with pytest.raises(CheckpointError, match="begins anew"):
        nxd.load_checkpoint(tmp_path, "best", model, optimizer)
    nxd.load_checkpoint(tmp_path, "best", model)
    assert loss(model) == saved
    assert trained(model, optimizer) < loss(started) * 0.99


def test_a_merged_state_dict_does_not_count_the_adapter_twice(tmp_path: Path):
    for options in ({}, {"save_lora_config_adapter": True}):
        model, optimizer = job(**MERGED, **options)
        saved = pytest.approx(trained(model, optimizer), rel=1e-5)
        other = copy.deepcopy(model)
        torch.save(model.state_dict(), tmp_path / "state.pt")
        model.load_state_dict(model.state_dict())
        assert loss(model) == saved
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert loss(other) == saved
    trained(model, optimizer)
    copied = {name: value for name, value in model.state_dict().items() if name != "lora_config"}
    before = loss(model)
    for strict in (True, False):
        with pytest.raises(WeightMismatchError, match=r"merge_lora = False .* clear_adapter"):
            model.load_state_dict(copied, strict=strict)
    assert loss(model) == before
    model.clear_adapter()
    model.load_state_dict(copied)
    assert loss(model) == pytest.approx(before, rel=1e-5)


def test_plain_weights_keep_the_adapter(tmp_path: Path):
    nxd.save_checkpoint(tmp_path, "plain", net(1))
    expected, optimizer = job()
    trained(expected, optimizer)
    adapter = expected.state_dict()
    expected.load_state_dict(net(1).state_dict())
    for options in ({}, MERGED):
        for load in (
            lambda model: nxd.load_checkpoint(tmp_path, "plain", model),
            lambda model: model.load_state_dict(net(1).state_dict()),
        ):
            model, _ = job(**options)
            model.load_state_dict(adapter)
            load(model)
            assert loss(model) == loss(expected)


def test_weights_that_do_not_say_whether_they_are_merged_give_a_warning(caplog: pytest.LogCaptureFixture):
    model = adapted(Pair(), target_modules=["mid"], save_lora_base=True)
    plain = Pair().state_dict()
    with_base = {name: value for name, value in model.state_dict().items() if "lora_" not in name}
    for silent in (plain, with_base, {"embed.weight": plain["embed.weight"], "head.weight": plain["head.weight"]}):
        model.load_state_dict(silent, strict=False)
    model.clear_adapter()
    model.load_state_dict(dict(plain))
    assert "does not say" not in caplog.text
    model = adapted(Pair(), target_modules=["mid"])
    model.load_state_dict(dict(plain))
    assert "does not say whether its weights contain an adapter" in caplog.text


@pytest.mark.parametrize("target", ["embed", "head"])
def test_both_tied_weights_are_in_merged_ones(target: str, tmp_path: Path):
    model = adapted(Pair(), target_modules=[target], **MERGED)
    expected, other = model(IDS).detach(), Pair(tied=False)
    load_weights(other, gather_weights(model), rank=0, degree=1)
    assert error(other(IDS).detach(), expected) < 1e-5
    nxd.save_checkpoint(tmp_path, "a", model)
    other = Pair(tied=False)
    nxd.load_checkpoint(tmp_path, "a", other)
    assert error(other(IDS).detach(), expected) < 1e-5
    for tied in (Pair(), adapted(Pair(), target_modules=["mid"]), model):
        before = tied(IDS).detach()
        with pytest.raises(WeightMismatchError, match="one weight in this model, and two different ones"):
            nxd.load_checkpoint(tmp_path, "a", tied)
        if isinstance(tied, LoRAModel):
            with pytest.raises(WeightMismatchError, match="one weight in this model, and two different ones"):
                tied.load_state_dict(model.state_dict())
        assert torch.equal(tied(IDS), before)


@pytest.mark.parametrize(("target", "strict"), [("mid", True), ("embed", False)])
def test_a_tied_weight_is_read_under_the_name_that_is_stored(target: str, strict: bool, tmp_path: Path):
    plain = Pair(head_first=True)
    nxd.save_checkpoint(tmp_path, "a", plain)  # which has no embed.weight
    model = LoRAModel(Pair(), LoraConfig(lora_rank=2, target_modules=[target]))
    nxd.load_checkpoint(tmp_path, "a", model, strict=strict)
    assert torch.equal(model(IDS), plain(IDS))
    short = {"head.weight": torch.zeros(9, 8), "mid.weight": torch.zeros(8, 8), "mid.bias": torch.zeros(8)}
    with pytest.raises(WeightMismatchError, match=r"head\.weight"):
        model.load_weights(as_source(short), 0, 1, strict)
    assert torch.equal(model(IDS), plain(IDS))


def test_a_head_that_is_the_embedding_cannot_be_merged(tmp_path: Path):
    """Our tied decoders have no second name for it: merged, the head would change, too."""
    model = adapted(decoder("tied"), target_modules=["embed_tokens", "q_proj"], **MERGED)
    for merge in (
        model.merge,
        model.state_dict,
        lambda: gather_weights(model),
        lambda: nxd.save_checkpoint(tmp_path, "a", model),
    ):
        with pytest.raises(ParallelConfigError, match=r"head is the weight of 'model.embed_tokens'.*merge_lora=False"):
            merge()
    model = adapted(decoder("tied"), target_modules=["q_proj"])
    expected = model(**tokens())[1].detach()
    assert error(model.eval().merge()(**tokens())[1].detach(), expected) < 1e-4


class Scaled(nn.Embedding):
    def __init__(self):
        super().__init__(10, 8)
        self.register_buffer("embed_scale", torch.tensor(3.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale


def parallel_scaled() -> nn.Module:
    layer = ScaledParallelEmbedding(10, 8)
    layer.register_buffer("embed_scale", torch.tensor(3.0), persistent=False)
    return layer


@pytest.mark.parametrize("make", [Scaled, parallel_scaled, ColumnParallelConv1D, RowParallelConv1D])
def test_the_update_of_a_scaled_or_transposed_weight_is_so_too(make: Callable[..., nn.Module]):
    plain = make in (Scaled, parallel_scaled)
    model, x = adapted(nn.Sequential(make() if plain else make(8, 8)), target_modules=["0"]).eval(), torch.randn(3, 8)
    expected = model(IDS if plain else x).detach()
    assert error(model.merge()(IDS if plain else x).detach(), expected) < 1e-5


def test_the_projection_that_attention_of_torch_reads_by_itself_is_no_target():
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    with pytest.raises(LoraTargetError, match="the layers that can be adapted are linear1, linear2"):
        LoRAModel(layer, LoraConfig(lora_rank=2, target_modules=["out_proj"]))


def test_encoder_layers_of_torch_call_their_adapted_layers_in_evaluation():
    """Not by the fast path, which reads the base's weights; padding makes nested tensors there."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = adapted(nn.TransformerEncoder(layer, 2), target_modules=["linear1", "linear2"])
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, False], [False, False, True]])
    for options in ({}, {"src_key_padding_mask": padding}):
        expected = model.train()(x, **options)[~padding].detach()
        found = model.eval()(x, **options)[~padding]
        with torch.no_grad():
            assert error(model(x, **options)[~padding], expected) < 1e-5
        assert found.requires_grad
        assert error(found.detach(), expected) < 1e-5


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.ModuleDict({"emb": nn.Embedding(10, 8)}), nn.ModuleDict()
        self.dec["emb"] = self.enc["emb"]

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.enc["emb"](ids), self.dec["emb"](ids)])


@pytest.mark.parametrize("target", ["enc.emb", "dec.emb"])
def test_merging_in_place_leaves_a_layer_under_its_name_without_an_adapter(target: str):
    model = adapted(Halves(), target_modules=[target], save_lora_base=True).eval()
    expected, before = model(IDS).detach(), {name: value.clone() for name, value in model.state_dict().items()}
    model.merge()
    assert error(model(IDS).detach(), expected) < 1e-5
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(model.unmerge()(IDS), expected)
    weights = [param for name, param in model.named_parameters(remove_duplicate=False) if name.endswith("weight")]
    assert len({id(weight) for weight in weights}) == 3, "still one table and two factors"


@pytest.mark.parametrize("options", [{}, MERGED])
def test_modules_with_extra_state_are_saved_and_loaded(options: dict[str, Any], tmp_path: Path):
    x, same, another = torch.randn(3, 4), Shared(), Shared()
    another.load_state_dict(same.state_dict())
    model = adapted(same, target_modules=["a", "b"], **options)
    if options:  # merged, every name of a layer is that of a plain one
        another.load_state_dict(model.state_dict())
        assert error(another(x).detach(), model(x).detach()) < 1e-5
    nxd.save_checkpoint(tmp_path, "a", model)
    other = LoRAModel(Shared() if options else another, LoraConfig(lora_rank=2, target_modules=["a", "b"]))
    nxd.load_checkpoint(tmp_path, "a", other)
    assert error(other(x).detach(), model(x).detach()) < 1e-5
