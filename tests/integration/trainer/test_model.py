"""What needs ranks of a model under the trainer: how it is built, padding, recomputation, its position in the data."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import LOCAL, current_context, use_context
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import weight_layout
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.random import get_xla_rng_tracker, model_parallel_xla_manual_seed
from nxd_infer.trainer import ResumableLoader, load_checkpoint, save_checkpoint
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import training, wrapped
from tests.support.trainer.models import Numbers, decoder, llama, tokens, vectors
from tests.support.trainer.padded import UnpaddedModel


def told(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# --- how it is built --------------------------------------------------------------------------------------


def states(folder: str) -> dict[str, Any]:
    """What a configuration makes of the parallel state; what cannot be built; whether seeds that agree are used up."""
    found: dict[str, Any] = {"tp": parallel_state.get_tensor_model_parallel_size()}
    found["mismatch"] = told(lambda: nxd.neuronx_distributed_config(tensor_parallel_size=1))
    with use_context(LOCAL):
        before = ColumnParallelLinear(4, 4)
    found["built before"] = told(lambda: wrapped(lambda: before))
    found["no sequence"] = told(lambda: wrapped(partial(nn.Linear, 2, 2), sequence_parallel=True))
    found["odd"] = told(lambda: wrapped(llama, sequence_parallel=True).run_train(**tokens(2, 7)))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    wrapped(llama)
    found["seed used"] = not torch.equal(state, torch.get_rng_state())
    parallel_state.destroy_model_parallel()
    nxd.neuronx_distributed_config(tensor_parallel_size=1)
    found["dp"] = parallel_state.get_data_parallel_size()
    own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(own[1].weight, float(current_context().rank))  # pyright: ignore[reportArgumentType]
    found["differs"] = told(lambda: wrapped(lambda: own))
    text = io.StringIO()
    with nxd.trainer.TrainingProgress(total=1, log_dir=folder, console=Console(file=text)) as progress:
        progress.step(1.0)
    found["shown"] = text.getvalue()
    parallel_state.destroy_model_parallel()
    found["indivisible"] = told(lambda: nxd.neuronx_distributed_config(tensor_parallel_size=3))
    return found


def test_two_ranks(tmp_path: Path):
    """A model that was built elsewhere is not trained as several; only the first rank shows and writes its progress."""
    for rank, found in enumerate(run_ranks(states, 2, str(tmp_path))):
        assert (found["tp"], found["dp"], found["seed used"]) == (2, 2, True)
        assert "tensor_parallel_size=1, but model parallelism is initialised with 2" in found["mismatch"]
        assert "does not divide the world of 2 ranks" in found["indivisible"]
        said = f"'ColumnParallelLinear' was built for rank 0 of 1 of the axis 'tp', and this is rank {rank} of 2: "
        assert said in found["built before"]
        assert "hold different values of 1 parameter(s), such as '1.weight': build the model in" in found["differs"]
        assert "no layer of the model has sequence_parallel_enabled=True" in found["no sequence"]
        assert found["odd"].startswith("CollectiveError") and "7" in found["odd"]
        assert ("step 1/1" in found["shown"]) is (rank == 0)
    assert len(list(tmp_path.iterdir())) == 1


def built_in_turns() -> dict[str, Any]:
    """Ranks with different seeds, one building at a time, build one model and keep their own random numbers."""
    torch.manual_seed(100 + current_context().rank)
    expected = torch.get_rng_state()
    model = wrapped(llama, model_init_config={"sequential_move_factor": 1})
    same_after = torch.equal(expected, torch.get_rng_state())
    meta = wrapped(llama, model_init_config={"meta_device_init": True})
    key = "model.layers.0.self_attn.k_proj.weight"
    return {"own numbers": same_after, "heads": model.state_dict()[key], "meta": meta.state_dict()[key]}


# --- padding ----------------------------------------------------------------------------------------------


def padded_heads() -> dict[str, Any]:
    """3 query heads on 2 ranks, AdamW with weight decay: the filling stays exactly zero, on both ways to pad."""
    found: dict[str, Any] = {"filling": 0, "stood still": []}
    for model_fn, options in ((partial(decoder, "odd_heads"), {}), (UnpaddedModel, {"pad_model": True})):
        torch.manual_seed(0)
        model = wrapped(model_fn, **options)
        optimizer = nxd.initialize_parallel_optimizer(
            model.nxd_config, torch.optim.AdamW, model.parameters(), lr=1e-2, weight_decay=0.1
        )
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(4):
            model.run_train(**(tokens() if model_fn is not UnpaddedModel else vectors()))
            optimizer.step()
            optimizer.zero_grad()
        tp = current_context().tp
        for name, layout in weight_layout(model.local_module()).items():
            param = model.state_dict()[name]
            for where, value in layout.rank_layout(tp.degree, tp.rank).fills():
                found["filling"] += param[where].numel()
                assert value == 0 and not param[where].any(), name
        real = [name for name, p in before.items() if p.any()]  # a rank may hold nothing but filling
        params = dict(model.named_parameters())
        found["stood still"] += [name for name in real if torch.equal(params[name], before[name])]
    return found


def on_four_ranks() -> dict[str, Any]:
    return {**built_in_turns(), **padded_heads()}


def test_one_model_whatever_the_seeds_and_padding_that_stays_zero():
    found = run_ranks(on_four_ranks, 4)  # two key/value heads on four ranks: neighbours hold the same
    assert all(rank["own numbers"] for rank in found)
    for key in ("heads", "meta"):
        assert torch.equal(found[0][key], found[1][key]) and torch.equal(found[2][key], found[3][key])
        assert not torch.equal(found[0][key], found[2][key])
    assert all(rank["stood still"] == [] for rank in found)
    assert found[3]["filling"] > 1000


# --- activation checkpointing -----------------------------------------------------------------------------


class Dropping(nn.Module):
    """Layers with dropout on whole tensors and, in the tensor-parallel stream, on split ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


class Layer(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(16, 32, gather_output=False)
        self.down = RowParallelLinear(32, 16, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        Layer.calls += 1
        inner = torch.relu(self.up(F.dropout(x, 0.3)))
        with get_xla_rng_tracker().fork():
            inner = F.dropout(inner, 0.3)
        return x + self.down(inner)


OPTIONS = {"none": None, "full": "full", "class": Layer, "several": [Layer, ColumnParallelLinear]}


def checkpointed_gradients() -> dict[str, list]:
    found = {}
    for name, option in OPTIONS.items():
        model_parallel_xla_manual_seed(1)
        model = wrapped(Dropping, activation_checkpoint_config=option)
        Layer.calls = 0
        losses = [model.run_train(**vectors()) for _ in range(2)]
        calls = Layer.calls
        graph = model(**vectors())  # passed backward twice, with the same random numbers each time
        graph.backward(retain_graph=True)
        graph.backward()
        found[name] = [*losses, *(p.grad for p in model.parameters()), torch.rand(2), torch.tensor(calls)]
    return found


def test_checkpointed_gradients_are_bit_equal():
    """With dropout in both random streams; also the numbers drawn afterwards."""
    for found in [checkpointed_gradients(), *run_ranks(checkpointed_gradients, 2)]:
        assert found["none"][-1] == 6 and found["full"][-1] == 12  # the layers ran twice
        for name in ("full", "class", "several"):
            pairs = zip(found["none"][:-1], found[name][:-1], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), name


def test_a_checkpointed_model_is_exported():
    model = wrapped(llama, activation_checkpoint_config="full").local_module().eval()
    ids = tokens()["input_ids"]
    exported = torch.export.export(model, (ids,))
    with torch.no_grad():
        assert torch.allclose(exported.module()(ids), model(ids))


class Dropped(nn.Module):
    """Learns with dropout, so that every step draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x).square().mean()


Job = tuple[Any, Any, ResumableLoader]


def job(batch_size: int, seed: int, num_workers: int = 0) -> Job:
    model, optimizer = training(Dropped, seed=seed, optimizer_config={"zero_one_enabled": True})
    torch.manual_seed(100 + seed + current_context().rank)
    return model, optimizer, ResumableLoader(Numbers(), batch_size, shuffle=True, seed=3, num_workers=num_workers)


def train(parts: Job, epochs: int, root: str = "", save_at: int = -1) -> list[tuple[int, list[int], float]]:
    """Train to the end of the last epoch; the epoch, this rank's samples and its loss of every step."""
    model, optimizer, loader = parts
    done = []
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            loss = model.run_train(x=batch["x"])
            optimizer.step()
            optimizer.zero_grad()
            done.append((epoch, batch["index"].tolist(), float(loss)))
            if len(done) == save_at:
                save_checkpoint(root, "middle", model, optimizer, dataloader=loader, user_content=len(done))
    return done


def stopped_and_resumed(root: str, num_workers: int) -> tuple[list, list]:
    whole = train(job(2, 0, num_workers), 2, root, save_at=7)
    again = job(2, 1, num_workers)
    assert load_checkpoint(root, None, *again[:2], dataloader=again[2]) == 7
    return whole, train(again, 2)


def resumed(root: str, batch_size: int) -> list:
    parts = job(batch_size, 2)
    load_checkpoint(root, None, *parts[:2], dataloader=parts[2])
    return train(parts, 2)


def test_the_data_go_on_where_they_were(tmp_path: Path):
    """Saved in the second epoch at dp 2: bit by bit at dp 2, dropout included; the same samples a step at dp 1."""
    ranks = run_ranks(stopped_and_resumed, 2, str(tmp_path), 0, tp=1)
    for whole, again in ranks:
        assert len(whole) == 10 and again == whole[7:]
    steps = list(zip(*(whole for whole, _ in ranks), strict=True))
    for epoch in (0, 1):
        samples = [index for first, second in steps if first[0] == epoch for index in first[1] + second[1]]
        assert len(set(samples)) == 20  # the two that fill no step are left out
    (alone,) = run_ranks(resumed, 1, str(tmp_path), 4)
    assert [(epoch, samples) for epoch, samples, _ in alone] == [
        (first[0], first[1] + second[1]) for first, second in steps[7:]
    ]


def test_what_workers_fetched_ahead_is_not_lost(tmp_path: Path):
    whole, again = stopped_and_resumed(str(tmp_path), num_workers=2)
    assert len(whole) == 22 and again == whole[7:]


def test_each_rank_of_another_loader_gets_its_own(tmp_path: Path):
    """Anything with ``state_dict()`` will do; positions that differ between ranks go on at their degrees only."""
    for same_on_rank in run_ranks(positions_of_ranks, 2, str(tmp_path), tp=1):
        assert same_on_rank
    with pytest.raises(
        CheckpointError, match=r"another position in the data for each rank, .*'dp': 2.*ResumableLoader"
    ):
        load_checkpoint(tmp_path, "own", dataloader=Position())
    with pytest.raises(CheckpointError, match=r"no position in the data; it was saved without dataloader="):
        load_checkpoint(tmp_path, "none", dataloader=Position())
    same = Position()
    load_checkpoint(tmp_path, "same", dataloader=same)
    assert same.state == {"at": 5, "seen": [1, 2]}


class Position:
    state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def positions_of_ranks(root: str) -> bool:
    mine, empty = Position(), Position()
    mine.state = {"at": current_context().rank, "queue": torch.arange(3) + current_context().rank}
    save_checkpoint(root, "own", dataloader=mine)
    save_checkpoint(root, "none")
    load_checkpoint(root, "own", dataloader=empty)
    same = empty.state["at"] == mine.state["at"] and torch.equal(empty.state["queue"], mine.state["queue"])
    mine.state = {"at": 5, "seen": [1, 2]}
    save_checkpoint(root, "same", dataloader=mine)
    return same
