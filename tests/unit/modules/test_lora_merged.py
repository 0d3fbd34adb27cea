"""Merged weights contain the adapter: loaded again it must not count twice, and tied weights differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.distributed.layers import ColumnParallelConv1D, RowParallelConv1D, ScaledParallelEmbedding
from nxd_infer.errors import CheckpointError, LoraTargetError, ParallelConfigError, WeightMismatchError
from nxd_infer.layout import load_weights
from nxd_infer.layout.sources import as_source
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.trainer import gather_weights
from tests.support.modules.lora import ALL, IDS, MERGED, Net, Pair, Shared, adapted, batch, net
from tests.support.parallel_layers.compare import error
from tests.support.trainer.jobs import train
from tests.support.trainer.models import decoder, tokens


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


def test_a_model_says_which_adapter_it_has(tmp_path: Path):
    """Its configuration is that of the adapter it started from; the one that was given is left as it is."""
    model, _ = job(lora_alpha=5)
    nxd.save_checkpoint(tmp_path, "a", model)
    config = nxd.neuronx_distributed_config(lora_config={"load_lora_from_ckpt": True, "lora_save_dir": str(tmp_path)})
    for _ in range(2):
        started = nxd.initialize_parallel_model(config, Net)
        restored = started.nxd_config["lora_config"]
        assert (restored.lora_rank, restored.lora_alpha) == (3, 5) and restored.target_modules
        assert restored is started.lora_config
        assert config["lora_config"].lora_rank == LoraConfig().lora_rank != 3
    assert model.nxd_config["lora_config"].lora_rank == 3


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
    """As Gemma's."""

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
    """One table under two names."""

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
