"""The seed's group vocabulary on real ranks over gloo."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from nxd_infer import parallel_state as ps
from nxd_infer.comm import all_reduce
from nxd_infer.context import current_context
from nxd_infer.errors import NotInitializedError, ParallelConfigError
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from tests.support.ranks import run_ranks

AXES = ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel", "context_parallel")


def sums_over_groups() -> list[float]:
    """What each axis's torch.distributed group sums, and what its ``as_list`` form says it should."""
    found = []
    for axis in AXES:
        group, lists = getattr(ps, f"get_{axis}_group")(), getattr(ps, f"get_{axis}_group")(as_list=True)
        x = torch.tensor([2.0 ** dist.get_rank()])
        dist.all_reduce(x, group=group)
        (mine,) = [ranks for ranks in lists if dist.get_rank() in ranks]
        assert x.item() == sum(2.0**rank for rank in mine), axis
        assert dist.get_world_size(group) == getattr(ps, f"get_{axis}_size")() == len(mine)
        assert dist.get_rank(group) == getattr(ps, f"get_{axis}_rank")() == mine.index(dist.get_rank())
        assert getattr(ps, f"get_{axis}_src_rank")() == mine[0]
        assert getattr(ps, f"get_{axis}_group")() is group, "one group, however often it is asked for"
        found.append(x.item())
    assert ps.get_world_group() is dist.group.WORLD
    assert ps.get_world_group(as_list=True) == [list(range(dist.get_world_size()))]
    return found


def test_every_axis_has_its_torch_group():
    found = run_ranks(sums_over_groups, 4, tp=2)
    assert found == [[3, 5, 1, 1], [3, 10, 2, 2], [12, 5, 4, 4], [12, 10, 8, 8]]
    found = run_ranks(sums_over_groups, 4, tp=1, pp=2, cp=2)
    assert [f[2:] for f in found] == [[5, 3], [10, 3], [5, 12], [10, 12]]


def through_the_experts() -> tuple[list, list, bool]:
    """What comes for this rank's expert, what comes back, and whether the gradient is that of the move."""
    context = current_context()
    x = torch.arange(8.0).reshape(2, 4, 1) + 10 * context.dp.rank + 100 * context.tp.rank
    x.requires_grad_(True)
    inside = mappings.all_to_all(x)
    back = mappings.all_to_all(inside * (context.ep.rank + 1))
    back.sum().backward()
    assert ps.get_expert_data_parallel_size() == 1 and dist.get_world_size(ps.get_expert_model_parallel_group()) == 2
    return inside.flatten().tolist(), back.flatten().tolist(), x.grad[0].eq(1).all() and x.grad[1].eq(2).all()


def test_tokens_go_to_the_ranks_of_their_experts_and_back():
    found = run_ranks(through_the_experts, 4, tp=2, ep=2)
    assert found[0][0] == [0, 1, 2, 3, 10, 11, 12, 13] and found[2][0] == [4, 5, 6, 7, 14, 15, 16, 17]
    assert found[2][1] == [10, 11, 12, 13, 28, 30, 32, 34]
    assert all(same for _, _, same in found)


def initialise_again() -> list[str]:
    said = []
    for sizes in ((2,), (3,), (64, 1), (1, 3)):
        if sizes != (2,):
            ps.destroy_model_parallel()
        try:
            ps.initialize_model_parallel(*sizes)
        except ParallelConfigError as error:
            said.append(str(error))
    ps.initialize_model_parallel(1, 2)
    stale = (ps.get_tensor_model_parallel_size(), ps.get_pipeline_model_parallel_size())
    assert stale == (1, 2), "another degree after destroy is never a stale one"
    x = torch.ones(2)
    assert all_reduce(x, current_context(), "pp").tolist() == [2, 2]
    assert dist.is_initialized(), "torch.distributed is left to its owner"
    groups = ps.initialize_model_parallel(2, mesh_only=True)
    assert groups == ps.ParallelGroups([[0, 1]], *[[[0], [1]]] * 5)
    assert ps.get_pipeline_model_parallel_size() == 2, "mesh_only initialises nothing"
    return said


def test_initialising_again_needs_destroy_and_possible_degrees():
    for said in run_ranks(initialise_again, 2):
        assert len(said) == 4
        assert "already initialised" in said[0] and "destroy_model_parallel()" in said[0]
        assert all("does not divide the world of 2 ranks" in text for text in said[1:])


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.context = current_context()

    def forward(self, x):
        return all_reduce(x, self.context)


def check_copies() -> None:
    module = Holder()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin(torch.ones(1)).item() == 2
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(2)
    with pytest.raises(NotInitializedError, match="has no transport 'distributed-"):
        module(torch.ones(1))


def no_torch_group() -> None:
    assert ps.get_tensor_model_parallel_group(as_list=True) == [[0, 1]]
    group = ps.get_tensor_model_parallel_group()
    assert (group.size(), group.rank()) == (2, ps.get_tensor_model_parallel_rank())
    x = reduce_from_tensor_model_parallel_region(torch.ones(2), group)
    assert x.tolist() == [2, 2]


def test_a_module_can_be_copied_and_never_uses_groups_that_are_gone():
    run_ranks(check_copies, 2)


def test_without_torch_groups_a_group_is_the_name_of_its_axis():
    run_ranks(no_torch_group, 2, collectives="shm")
