"""ZeRO-1 over ranks: the share of each, group mix-ups, saving and loading sharded states."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_infer as nxd
from nxd_infer import comm, parallel_state
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.optimizer import NeuronZero1Optimizer
from tests.support.optimizer.momentum import momentum
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, AdamW, losses_of, mine, training
from tests.support.trainer.models import decoder, llama, tokens


def shares_and_mix_ups() -> dict[str, Any]:
    """What this rank holds of the states, and what is said of groups that are not those of their axis."""
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(nxd.neuronx_distributed_config(2), llama)
    optimizer = NeuronZero1Optimizer(model.parameters(), AdamW, lr=1e-3)
    model.run_train(**mine(tokens()))
    optimizer.step()
    params = sum(p.numel() for p in model.parameters())
    state = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    messages = []
    for name, groups in (
        ("sharding_groups", parallel_state.get_tensor_model_parallel_group(as_list=True)),
        ("grad_norm_groups", [[0, 3], [1, 2]]),
        ("sharding_groups", parallel_state.get_data_parallel_group()),
    ):
        try:
            NeuronZero1Optimizer(model.parameters(), AdamW, **{name: groups})
        except ParallelConfigError as error:
            messages.append(str(error))
    return {"share": state / params, "messages": messages, "norm": float(optimizer.grad_norm or 0)}


def test_each_rank_holds_its_share_and_groups_are_not_mixed_up():
    found = run_ranks(shares_and_mix_ups, 4, tp=2)
    for rank in found:
        assert 0.45 < rank["share"] < 0.55 and rank["norm"] > 0
        mixed_up, foreign, no_list = rank["messages"]
        assert no_list.endswith("; pass parallel_state.get_data_parallel_group(as_list=True), or leave it out")
        assert "sharding_groups must be the groups of axis 'dp', [[0, 2], [1, 3]]" in mixed_up
        assert "they are [[0, 1], [2, 3]], the groups of axis 'tp'" in mixed_up
        assert "get_data_parallel_group(as_list=True)" in mixed_up
        assert "grad_norm_groups must be the groups of axis 'tp'" in foreign
    for tp in range(2):  # the shares of the data-parallel ranks make one whole, and one element a bucket at most
        assert 1.0 <= found[tp]["share"] + found[tp + 2]["share"] < 1.001


def state_of_a_share() -> list[float]:
    """How much of each parameter this rank holds a state of; asking for the others' changes nothing."""
    model, optimizer = momentum(**ZERO1)
    found = []
    for param in model.parameters():
        state = optimizer.state[param]
        found.append(state["speed"].numel() / param.numel() if param in optimizer.state else float(len(state)))
        if param not in optimizer.state:
            with pytest.raises(KeyError, match="other ranks update this parameter"):
                state["speed"] = param
            with pytest.raises(KeyError, match="other ranks update this parameter"):
                state.setdefault("speed", param)
    before = model.state_dict()["lm_head.weight"].clone()
    assert len(optimizer.state_dict()["state"]) == len(optimizer.state)
    optimizer.stop(also_weights=True)  # what it does to its share reaches the parameters of all
    assert before.any() and not model.state_dict()["lm_head.weight"].any()
    return found


def test_state_with_zero1_is_this_ranks_share():
    first, second = run_ranks(state_of_a_share, 2, tp=1)
    assert [a + b for a, b in zip(first, second, strict=True)] == pytest.approx([1.0] * len(first))
    assert 0.0 in first and 0.0 in second


def sharded_later() -> list[Any]:
    """``lazy_init``: the optimizer is made before the groups, and takes the weights as they are when it is sharded."""
    degree = current_context().dp.degree
    parallel_state.destroy_model_parallel()
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6))
    optimizer = NeuronZero1Optimizer([weight], AdamW, lazy_init=True, lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    found: list[Any] = [optimizer.inited, len(optimizer.state)]
    parallel_state.initialize_model_parallel(1)
    optimizer.sharding_groups = parallel_state.get_data_parallel_group(as_list=True)
    with torch.no_grad():
        weight.fill_(3.0)
    optimizer.init_zero()
    found += [optimizer.inited, optimizer.base_optimizer.param_groups[0]["params"][0].numel() * degree]
    with pytest.raises(ParallelConfigError, match=r"set it before init_zero\(\)"):
        optimizer.sharding_groups = [[0]]
    weight.sum().backward()
    optimizer.step()
    schedule.step()
    found += [weight.tolist(), optimizer.param_groups[0]["lr"]]
    with torch.no_grad():
        for shard in optimizer.base_optimizer.param_groups[0]["params"]:
            shard.fill_(7.0 + current_context().rank)
    optimizer.allgather_weights_and_update_full_parameter()
    return [*found, weight.tolist()]


def test_sharding_can_wait():
    for inited, states, after, whole, stepped, rate, gathered in run_ranks(sharded_later, 2, tp=1):
        assert (inited, states, after, whole, rate) == (False, 0, True, 6, 0.25)
        assert stepped == pytest.approx([3 * (1 - 0.5 * 0.01) - 0.5] * 6)
        assert gathered == [7.0] * 3 + [8.0] * 3


def summed_precisely() -> list[float]:
    """A weight after a step with a large gradient and a tiny one, by the type in which the ranks sum."""
    found = []
    for precise in (False, True):
        weight = torch.nn.Parameter(torch.ones(20))
        options: Any = {"lr": 1.0, "higher_cc_precision": precise}
        optimizer = NeuronZero1Optimizer([weight], torch.optim.SGD, torch.float64, False, **options)
        (weight * (1.0 if current_context().rank == 0 else 2.0**-30)).sum().backward()
        optimizer.step()
        found.append(optimizer.base_optimizer.param_groups[0]["params"][0][0].item())
    return found


def test_gradients_are_summed_in_the_optimizers_type_where_asked_for():
    assert run_ranks(summed_precisely, 2, tp=1) == [[0.5, 1 - (1 + 2.0**-30) / 2]] * 2


def resumed(folder: str, dtype: torch.dtype) -> list:
    """Saved after 3 steps and loaded into a fresh model and optimizer, training goes on bit by bit."""
    build = partial(decoder, "llama", dtype)
    model, optimizer = training(build, **ZERO1)
    losses_of(model, optimizer, 3)
    weights = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["lr"] = 3e-3
    optimizer.save_sharded_state_dict(folder, save_serially=True)
    in_memory = io.BytesIO()
    torch.save(optimizer.state_dict(), in_memory)
    wanted = losses_of(model, optimizer, 3)
    found = []
    for how in ("files", "memory"):
        other, fresh = training(build, seed=1, **ZERO1)
        other.load_state_dict(weights)
        if how == "files":
            fresh.load_sharded_state_dict(folder, num_workers_per_step=1)
        else:
            in_memory.seek(0)
            fresh.load_state_dict(torch.load(in_memory, weights_only=True))
        found.append(losses_of(other, fresh, 3) == wanted and fresh.param_groups[0]["lr"] == 3e-3)
        same = all(torch.equal(v, model.state_dict()[k]) for k, v in other.state_dict().items())
        found.append(same)
    return found


@pytest.mark.smoke
def test_a_sharded_state_is_saved_and_loaded(tmp_path: Path):
    assert run_ranks(resumed, 4, str(tmp_path), torch.bfloat16, tp=2) == [[True] * 4] * 4
    names = [f"optim.dp_rank_0{dp}.tp_rank_0{tp}.pp_rank_00" for dp in range(2) for tp in range(2)]
    wanted = sorted(name + ending for name in names for ending in (".json", ".safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == wanted


def wrong_states(folder: str) -> list[str]:
    found = []

    def attempt(action: Any) -> None:
        try:
            action()
            found.append("loaded")
        except CheckpointError as error:
            found.append(str(error))
        comm.barrier(current_context(), "dp")

    _, optimizer = training(**ZERO1)
    optimizer.save_sharded_state_dict(folder, save_serially=False)
    files = [Path(folder, f"optim.dp_rank_01.tp_rank_00.pp_rank_00.{kind}") for kind in ("json", "safetensors")]
    before = [file.read_bytes() for file in files]
    _, other = training(partial(decoder, "odd_heads"), **ZERO1)
    attempt(lambda: other.load_sharded_state_dict(folder))
    attempt(lambda: other.load_state_dict(optimizer.state_dict()))
    if current_context().dp.rank == 1:
        Path(folder, "optim.dp_rank_01.tp_rank_00.pp_rank_00.safetensors").write_bytes(b"short")
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.5
    attempt(lambda: optimizer.load_sharded_state_dict(folder))
    assert optimizer.param_groups[0]["lr"] == 0.5  # a rank whose own files are whole has not taken them
    optimizer.param_groups[0]["lr"] = rate
    optimizer.save_sharded_state_dict(folder)
    if current_context().dp.rank == 1:  # as if it had been killed before this rank wrote its files
        for file, content in zip(files, before, strict=True):
            file.write_bytes(content)
    comm.barrier(current_context(), "dp")
    attempt(lambda: optimizer.load_sharded_state_dict(folder))
    if current_context().dp.rank == 1:
        Path(folder, "optim.dp_rank_01.tp_rank_00.pp_rank_00.safetensors").unlink()
    attempt(lambda: optimizer.load_sharded_state_dict(folder))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    _, elsewhere = training(**ZERO1)
    attempt(lambda: elsewhere.load_sharded_state_dict(folder))
    return found


def test_states_that_do_not_fit(tmp_path: Path):
    first, second = run_ranks(wrong_states, 2, str(tmp_path), tp=1)
    for model, memory, _, half, _, degrees in (first, second):
        assert "is of another save than" in half and "was interrupted" in half
        assert "belongs to another model" in model and "self_attn" in model
        assert "it describes" in memory
        assert degrees == "loaded" or "dp 2, tp 1" in degrees or "is missing" in degrees
    assert "cannot be read" in second[2] and "gave up" in first[2]
    assert "is missing" in second[4] and "is of another save than" in first[4]
    assert "was saved at dp 2, tp 1, pp 1, but this job runs at dp 1, tp 2, pp 1" in first[5]
