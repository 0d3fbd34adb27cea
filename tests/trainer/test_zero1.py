"""ZeRO-1: the seed document's sample, the share of each rank, group mix-ups, saving and loading sharded states."""

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
from tests.ranks import run_ranks
from tests.trainer.jobs import ZERO1, AdamW, mine, training
from tests.trainer.models import decoder, llama, tokens


def seed_sample() -> dict[str, Any]:
    """The sample of the seed document's chapter on the ZeRO-1 optimizer."""
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(nxd.neuronx_distributed_config(2), llama)
    no_decay = ["norm"]
    param_optimizer = list(model.named_parameters())
    grouped = [
        {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = NeuronZero1Optimizer(
        grouped,
        AdamW,
        lr=1e-3,
        pin_layout=False,
        sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_group(as_list=True),
    )
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


def test_the_seed_documents_sample():
    found = run_ranks(seed_sample, 4, tp=2)
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


def steps(model: Any, optimizer: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(float(model.run_train(**mine(tokens()))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def resumed(folder: str, dtype: torch.dtype) -> list:
    """Saved after 3 steps and loaded into a fresh model and optimizer, training goes on bit by bit."""
    build = partial(decoder, "llama", dtype)
    model, optimizer = training(build, **ZERO1)
    steps(model, optimizer, 3)
    weights = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["lr"] = 3e-3
    optimizer.save_sharded_state_dict(folder, save_serially=True)
    in_memory = io.BytesIO()
    torch.save(optimizer.state_dict(), in_memory)
    wanted = steps(model, optimizer, 3)
    found = []
    for how in ("files", "memory"):
        other, fresh = training(build, seed=1, **ZERO1)
        other.load_state_dict(weights)
        if how == "files":
            fresh.load_sharded_state_dict(folder, num_workers_per_step=1)
        else:
            in_memory.seek(0)
            fresh.load_state_dict(torch.load(in_memory, weights_only=True))
        found.append(steps(other, fresh, 3) == wanted and fresh.param_groups[0]["lr"] == 3e-3)
        same = all(torch.equal(v, model.state_dict()[k]) for k, v in other.state_dict().items())
        found.append(same)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sharded_state_is_saved_and_loaded(tmp_path: Path, dtype: torch.dtype):
    assert run_ranks(resumed, 4, str(tmp_path), dtype, tp=2) == [[True] * 4] * 4
    names = [f"optim.dp_rank_0{dp}.tp_rank_0{tp}.pp_rank_00" for dp in range(2) for tp in range(2)]
    wanted = sorted(name + ending for name in names for ending in (".json", ".safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == wanted


@pytest.mark.check
def test_files_that_cannot_be_written_or_understood(tmp_path: Path):
    model, optimizer = training(llama, **ZERO1)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        optimizer.save_sharded_state_dict(blocked)
    optimizer.save_sharded_state_dict(tmp_path)
    described = tmp_path / "optim.dp_rank_00.tp_rank_00.pp_rank_00.json"
    text = described.read_text()
    two_groups = [{"params": [p]} for p in model.parameters()]
    other = NeuronZero1Optimizer(two_groups, AdamW)
    with pytest.raises(CheckpointError, match="has 1 parameter groups, and this optimizer"):
        other.load_sharded_state_dict(tmp_path)
    optimizer = NeuronZero1Optimizer(model.parameters(), AdamW)
    for damaged in ("[]", "{", text.replace('"pieces"', '"peaces"'), text.replace('"values": {}', '"values": 3')):
        assert damaged != text
        described.write_text(damaged)
        with pytest.raises(CheckpointError, match="describes no optimizer shard"):
            optimizer.load_sharded_state_dict(tmp_path)
    described.write_text(text)
    optimizer.load_sharded_state_dict(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".json") == [described.name]


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
    _, other = training(partial(decoder, "odd_heads"), **ZERO1)
    attempt(lambda: other.load_sharded_state_dict(folder))
    attempt(lambda: other.load_state_dict(optimizer.state_dict()))
    if current_context().dp.rank == 1:
        Path(folder, "optim.dp_rank_01.tp_rank_00.pp_rank_00.safetensors").write_bytes(b"short")
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
    for model, memory, _, _, degrees in (first, second):
        assert "belongs to another model" in model and "self_attn" in model
        assert "optimizer state: found" in memory or "it describes" in memory
        assert degrees == "loaded" or "dp 2, tp 1" in degrees or "is missing" in degrees
    assert "cannot be read" in second[2] and "gave up" in first[2]
    assert "is missing" in second[3] and "gave up" in first[3]
    assert "was saved at dp 2, tp 1, pp 1, and this job runs at dp 1, tp 2, pp 1" in first[4]
