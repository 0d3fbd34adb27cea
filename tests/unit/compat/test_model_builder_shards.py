"""Shards of checkpoints, and one process that stands for any rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from nxd_infer.compat.model_builder.functions import ModelBuilder, TraceArtifacts
from nxd_infer.compat.model_builder.parallel_context import NxDParallelState, init_on_device, mock_distributed
from nxd_infer.compat.model_builder.shards import get_sharded_checkpoint, shard_checkpoint
from nxd_infer.errors import NotInitializedError, ParallelConfigError, TraceConfigError, WeightMismatchError
from nxd_infer.layout import shard_state_dict, weight_layout
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding
from nxd_infer.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_size
from tests.support.builder_models import HEAD, KV_HEADS, WIDTH, Decoder, weights

WORDS = 41


class Everything(nn.Module):
    """Grouped-query attention in one weight, padding, tied embeddings, gate and up in one weight."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = ParallelEmbedding(WORDS, 16, pad=True)
        self.qkv = GQAQKVColumnParallelLinear(
            16, [16, 8], bias=False, gather_output=False, kv_size_multiplier=2, head_dim=4
        )
        self.gate_up_proj = ColumnParallelLinear(16, 24, bias=True, gather_output=False, stride=2)
        self.lm_head = ColumnParallelLinear(16, WORDS, bias=False, pad=True)
        self.lm_head.weight = self.embed_tokens.weight
        self.norm = nn.LayerNorm(16)


def built(model_class: type[nn.Module], degree: int, rank: int = 0) -> nn.Module:
    with NxDParallelState(degree, rank, degree), init_on_device("meta"):
        return model_class()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded weights by the users' names: queries, keys and values on their own, the tied table once."""
    torch.manual_seed(0)
    entries = [layout for layout in weight_layout(model).values() if not layout.alias_of]
    return {name: torch.randn(shape) for layout in entries for name, shape in layout.logical_shapes.items()}


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_shards_equal_layouts_name_by_name(degree: int, tmp_path):
    logical = {**whole(Everything()), "not.in.the.model": torch.ones(3)}
    before = {name: tensor.clone() for name, tensor in logical.items()}
    model = built(Everything, degree)
    shards = shard_checkpoint(logical, model, serialize_path=tmp_path)
    assert logical.keys() == before.keys() and all(torch.equal(logical[n], t) for n, t in before.items())
    for rank, shard in enumerate(shards):
        expected = shard_state_dict(built(Everything, degree, rank), logical, rank, degree, strict=False)
        stored = load_file(tmp_path / f"tp{rank}_sharded_checkpoint.safetensors")
        assert (
            shard.keys()
            == expected.keys()
            == stored.keys()
            == dict(model.named_parameters(remove_duplicate=False)).keys()
        )
        for name, tensor in expected.items():
            assert torch.equal(shard[name], tensor) and torch.equal(stored[name], tensor), name
        gate, up = logical["gate_up_proj.weight"].chunk(2)
        pieces = [part.chunk(degree)[rank] for part in (gate, up)]
        assert torch.equal(shard["gate_up_proj.weight"], torch.cat(pieces))
    rows = torch.cat([shard["lm_head.weight"] for shard in shards])
    assert torch.equal(rows[:WORDS], before["embed_tokens.weight"]) and not rows[WORDS:].any()
    assert torch.equal(shard_checkpoint(logical, model, degree - 1, degree - 1)[0]["norm.bias"], before["norm.bias"])


def test_hooks_change_a_copy_and_get_sharded_checkpoint_changes_its_argument():
    logical = weights()
    key = "layers.0.self_attn.k_proj.weight"
    model = built(Decoder, 4)
    shards = shard_checkpoint(logical, model)
    assert logical[key].shape == (KV_HEADS * HEAD, WIDTH)  # the hook repeats each head for two ranks
    for rank, shard in enumerate(shards):
        assert torch.equal(shard[key], logical[key].view(KV_HEADS, HEAD, WIDTH)[rank // 2])
        assert not any("past" in name for name in shard)
    in_place = {**logical, "other": torch.ones(1)}
    assert get_sharded_checkpoint(in_place, model, 3, 4) is in_place
    assert in_place.keys() == {*shards[3], "other"} and torch.equal(in_place[key], shards[3][key])
    built_model = Decoder()
    built_model.load_state_dict(get_sharded_checkpoint(dict(logical), built_model, 0, 1), strict=False)
    assert torch.equal(built_model.lm_head.weight, logical["lm_head.weight"])


def test_a_shard_that_cannot_be_is_refused():
    model = built(Everything, 2)
    with pytest.raises(WeightMismatchError, match=r"norm.weight is \[7\], wanted \[16\]"):
        shard_checkpoint({"norm.weight": torch.ones(7)}, model)
    with pytest.raises(ParallelConfigError, match="start_rank=1, end_rank=2: the ranks are 0 to 1"):
        shard_checkpoint({}, model, 1, 2)


def test_one_process_is_any_rank():
    with NxDParallelState(world_size=8, rank=5, tensor_model_parallel_size=4) as state:
        assert (get_tensor_model_parallel_size(), get_tensor_model_parallel_rank()) == (4, 1)
        with NxDParallelState(2, 0, 2):
            assert get_tensor_model_parallel_size() == 2
        layer = ColumnParallelLinear(4, 8)
        assert state.dp.degree == 2 and layer.weight.shape == (2, 4)
        with pytest.raises(NotInitializedError, match="rank 5 of 8 has no transport"):
            layer(torch.ones(1, 4))
    assert get_tensor_model_parallel_size() == 1 and not dist.is_initialized()
    with NxDParallelState(2, expert_model_parallel_size=2):
        experts = ColumnParallelLinear(4, 8)
    with pytest.raises(TraceConfigError, match="no expert parallel ranks"):
        ModelBuilder(experts).trace(args=torch.ones(1, 4))


def test_on_the_meta_device_buffers_have_values():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.register_buffer("frequencies", torch.arange(3))

    with init_on_device(torch.device("meta")):
        net = Net()
    assert net.norm.weight.is_meta and net.frequencies.tolist() == [0, 1, 2]


def test_scripts_for_real_ranks_run_in_a_mocked_world():
    from nxd_infer.parallel_state import initialize_model_parallel

    with mock_distributed(world_size=4, rank=2):
        dist.init_process_group("xla", rank=2, world_size=4)
        initialize_model_parallel(tensor_model_parallel_size=4, skip_collective_init=True)
        assert (dist.get_world_size(), get_tensor_model_parallel_rank()) == (4, 2)
        assert ColumnParallelLinear(4, 8).weight.shape == (2, 4)
        dist.destroy_process_group()
    assert not dist.is_initialized() and get_tensor_model_parallel_size() == 1


def test_what_cannot_be_traced_is_said_at_once():
    builder = ModelBuilder(built(Decoder, 2))
    ids = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(TraceConfigError, match=r"args=.* or kwargs="):
        builder.trace()
    with pytest.raises(TraceConfigError, match=r"'tokens', but Decoder.forward takes input_ids, position_ids"):
        builder.trace(kwargs={"tokens": ids})
    builder.trace(args=(ids, ids), tag="a")
    assert isinstance(builder.traced["a"], TraceArtifacts)
    with pytest.raises(TraceConfigError, match="the tag 'a' was traced before"):
        builder.trace(args=(ids, ids), tag="a")
    with pytest.raises(TraceConfigError, match="nothing was traced as 'b'; the tags are a"):
        builder.compile(priority_model_key="b")
