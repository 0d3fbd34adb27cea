"""The seed's group vocabulary in one process, without torch.distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxd_infer import parallel_layers
from nxd_infer import parallel_state as ps
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import NotInitializedError, ParallelConfigError


@pytest.fixture(autouse=True)
def clean():
    yield
    ps.destroy_model_parallel()


def test_uninitialised_is_one_rank():
    assert not ps.model_parallel_is_initialized()
    for axis in ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel", "context_parallel"):
        assert getattr(ps, f"get_{axis}_size")() == 1
        assert getattr(ps, f"get_{axis}_rank")() == 0
        assert getattr(ps, f"get_{axis}_src_rank")() == 0
        assert getattr(ps, f"get_{axis}_group")(as_list=True) == [[0]]
        group = getattr(ps, f"get_{axis}_group")()
        assert group.size() == 1 and group.rank() == 0 and list(group.ranks) == [0]
    assert ps.get_world_group(as_list=True) == [[0]] and ps.get_world_group().size() == 1
    with use_context(make_context(4, tp=2)), pytest.raises(NotInitializedError, match="init_process_group"):
        ps.get_world_group()


def test_one_process_initialises_without_torch_distributed():
    ps.initialize_model_parallel()
    assert ps.model_parallel_is_initialized()
    assert not torch.distributed.is_initialized(), "no process group is started"
    assert ps.get_tensor_model_parallel_group(as_list=True) == [[0]]
    with pytest.raises(ParallelConfigError, match=r"already initialised.*destroy_model_parallel"):
        ps.initialize_model_parallel()
    ps.destroy_model_parallel()
    ps.destroy_model_parallel()
    assert not ps.model_parallel_is_initialized()
    ps.initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)


@pytest.mark.parametrize("sizes", [(2,), (1, 2), (64, 1)])
def test_a_degree_above_the_world_is_an_error_and_not_clamped(sizes):
    with pytest.raises(ParallelConfigError, match="init_process_group"):
        ps.initialize_model_parallel(*sizes)
    assert not ps.model_parallel_is_initialized()
    with pytest.raises(ParallelConfigError, match="at least 1"):
        ps.initialize_model_parallel(0)


def test_the_references_keywords_at_their_neutral_values():
    neutral = {"context_parallel_size": 1, "expert_model_parallel_size": 1, "skip_collective_init": True, "lnc_size": 1}
    ps.initialize_model_parallel(1, 1, **neutral)
    assert ps.get_context_model_parallel_group(as_list=True) == [[0]]
    assert ps.get_context_parallel_group(as_list=True) == [[0]]
    ps.destroy_model_parallel()
    assert ps.initialize_model_parallel(mesh_only=True, **neutral).tp_groups == [[0]]
    with pytest.raises(ParallelConfigError, match="lnc_size=2 is not supported yet"):
        ps.initialize_model_parallel(lnc_size=2)
    assert parallel_layers.initialize_model_parallel is ps.initialize_model_parallel


def test_the_groups_of_a_launched_world_without_starting_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ps.initialize_model_parallel(2, mesh_only=True).tp_groups == [[0, 1], [2, 3]]
    assert not torch.distributed.is_initialized()


def test_experts_share_the_data_parallel_ranks(monkeypatch):
    """The reference's view: [pipeline, expert data, expert, tensor]."""
    monkeypatch.setenv("WORLD_SIZE", "16")
    groups = ps.initialize_model_parallel(2, 2, expert_model_parallel_size=2, mesh_only=True)
    assert groups is not None and groups.tp_groups[0] == [0, 1] and groups.dp_groups[0] == [0, 2, 4, 6]
    assert groups.ep_model_groups == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups.ep_data_groups == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    with use_context(make_context(16, 14, tp=2, pp=2, ep=2)):
        assert ps.get_expert_model_parallel_size() == 2 and ps.get_expert_model_parallel_rank() == 1
        assert ps.get_expert_data_parallel_size() == 2 and ps.get_expert_data_parallel_rank() == 1
        assert ps.get_expert_model_parallel_group(as_list=True) == groups.ep_model_groups
    with pytest.raises(ParallelConfigError, match="3 does not divide the 4 data parallel ranks"):
        ps.initialize_model_parallel(2, 2, expert_model_parallel_size=3, mesh_only=True)


def test_getters_follow_the_current_context():
    with use_context(make_context(8, 5, tp=2, pp=2)):
        assert ps.get_tensor_model_parallel_size() == 2 and ps.get_tensor_model_parallel_rank() == 1
        assert ps.get_data_parallel_size() == 2 and ps.get_data_parallel_rank() == 0
        assert ps.get_pipeline_model_parallel_size() == 2 and ps.get_pipeline_model_parallel_rank() == 1
        assert ps.get_tensor_model_parallel_src_rank() == 4
        assert ps.get_data_parallel_src_rank() == 5
        assert ps.get_pipeline_model_parallel_src_rank() == 1
        assert ps.get_pipeline_model_parallel_next_rank() == 1 == ps.get_pipeline_model_parallel_prev_rank()
        assert ps.get_data_parallel_group(as_list=True) == [[0, 2], [1, 3], [4, 6], [5, 7]]
        assert ps.get_world_group(as_list=True) == [list(range(8))]
        assert ps.get_tensor_model_parallel_group().rank() == 1 and not ps.is_global_rank_zero()
        assert ps.get_tensor_model_parallel_replica_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert ps.get_data_parallel_replica_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
        assert ps.get_pipeline_model_parallel_replica_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with use_context(make_context(4, cp=2, tp=2)):
        assert ps.get_context_model_parallel_replica_groups() == [[0, 2], [1, 3]]
        assert ps.get_context_model_parallel_src_tgt_pairs() == [[0, 2], [2, 0], [1, 3], [3, 1]]
    assert ps.get_tensor_model_parallel_size() == 1


class Scaled(nn.Module):
    def forward(self, x):
        return x * ps.get_tensor_model_parallel_size() + ps.get_tensor_model_parallel_rank()


def test_getters_can_be_called_while_exporting():
    with use_context(make_context(4, 2, tp=4)):
        exported = torch.export.export(Scaled(), (torch.ones(2),), strict=False)
    assert exported.module()(torch.ones(2)).tolist() == [6, 6]


ATTRIBUTES = {"tensor_model_parallel": True, "partition_dim": 1, "nxd_layout": ("runs", 3)}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        vars(self.first.weight).update(ATTRIBUTES)
        self.register_buffer("table", torch.arange(3.0))


@pytest.mark.parametrize("overwrite", [False, True])
def test_moving_a_model_keeps_attributes_and_ties(overwrite, monkeypatch):
    """``overwrite`` makes torch create new parameters, as it does for devices whose tensors are of another kind."""
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", overwrite)
    model = Tied()
    moved = ps.move_model_to_device(model, "meta")
    assert moved is model
    assert model.first.weight.device.type == model.first.bias.device.type == model.table.device.type == "meta"
    assert model.second.weight is model.first.weight
    assert vars(model.first.weight) == ATTRIBUTES
    assert not vars(model.first.bias)
    assert ps.move_model_to_device(Tied(), "meta", include_buffers=False).table.device.type == "cpu"


def test_groups_that_share_an_optimizer_state():
    with use_context(make_context(8, 3, tp=2)):
        assert (
            ps.get_zero1_sharding_groups() == ps.get_data_parallel_group(as_list=True) == [[0, 2, 4, 6], [1, 3, 5, 7]]
        )
    with use_context(make_context(8, 0, tp=2, cp=2)):
        assert ps.get_zero1_sharding_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert ps.get_data_parallel_group(as_list=True) == [[0, 4], [1, 5], [2, 6], [3, 7]]
