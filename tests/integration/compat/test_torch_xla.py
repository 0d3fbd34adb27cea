"""torch_xla for scripts on several real ranks: its collectives beside plain torch.distributed, and how ranks start."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_infer import compat
from tests.support.ranks import run_ranks

if PathFinder.find_spec("torch_xla") is not None:
    pytest.skip("torch_xla is installed, which compat never hides", allow_module_level=True)


def xla(name: str) -> Any:
    compat.install()
    return __import__(f"torch_xla.{name}", fromlist=["any"])


def gathered(x: torch.Tensor, ranks: list[int], group: Any) -> list[torch.Tensor]:
    """Of each of the ranks, by plain torch.distributed."""
    found = [torch.empty_like(x) for _ in ranks]
    dist.all_gather(found, x.contiguous(), group=group)
    return found


def each_collective() -> None:
    """All, over the world and over groups of two, against sums and pieces of what the ranks have."""
    xm = xla("core.xla_model")
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [[first, first + 1] for first in range(0, world, 2)]
    own = next(pair for pair in pairs if rank in pair)
    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(4, 2 * world, generator=generator, dtype=torch.float64)
    plain = next(group for group in [dist.new_group(pair) for pair in pairs] if dist.get_rank(group) >= 0)
    # A rank may know its group alone.
    for groups, ranks in ((None, list(range(world))), (pairs, own), ([own], own), (plain, own)):
        parts = gathered(x, ranks, plain if groups else None)
        stacked, place, count = torch.stack(parts), ranks.index(rank), len(ranks)
        close = torch.testing.assert_close
        close(xm.all_reduce(xm.REDUCE_SUM, x, scale=0.5, groups=groups), stacked.sum(0) * 0.5)
        close(xm.all_reduce(xm.REDUCE_MUL, x, groups=groups), stacked.prod(0))
        close(xm.all_reduce(xm.REDUCE_MAX, x, groups=groups), stacked.amax(0), rtol=0, atol=0)
        close(xm.all_reduce(xm.REDUCE_MIN, x, groups=groups), stacked.amin(0), rtol=0, atol=0)
        bits, all_bits = (x * 8).int(), list((stacked * 8).int())
        low = xm.all_reduce(xm.REDUCE_AND, bits, groups=groups)
        assert torch.equal(low, functools.reduce(torch.bitwise_and, all_bits))
        assert torch.equal(xm.all_reduce(xm.REDUCE_OR, bits > 3, groups=groups), torch.stack(all_bits).gt(3).any(0))
        for dim in (0, -1):
            assert torch.equal(xm.all_gather(x, dim, groups), torch.cat(parts, dim))
        both = xm.all_gather([x, bits], groups=groups, pin_layout=False)
        assert torch.equal(both[0], torch.cat(parts)) and both[1].dtype == torch.int32
        piece = stacked.sum(0).chunk(count, 1)[place] / count
        close(xm.reduce_scatter(xm.REDUCE_SUM, x, 1 / count, 1, count, groups, pin_layout=False), piece)
        swapped = torch.cat([part.chunk(count, 1)[place] for part in parts])
        assert torch.equal(xm.all_to_all(x, 1, 0, count, groups, pin_layout=False), swapped)
        output = torch.empty_like(piece)
        assert xm.reduce_scatter(xm.REDUCE_SUM, x, 1.0, -1, count, groups, output=output) is output
        close(output, piece * count)
        given = [x.clone(), x[0].clone().requires_grad_()]
        assert xm.all_reduce(xm.REDUCE_SUM, given, scale=2.0, groups=groups) is given
        close(given[0], stacked.sum(0) * 2)
        close(given[1].detach(), stacked.sum(0)[0] * 2)
    half = xm.all_reduce(xm.REDUCE_SUM, torch.full((2,), 1 + 2**-7, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16 and half[0] == world * (1 + 2**-7)
    count = xm.all_reduce(xm.REDUCE_SUM, torch.tensor([2**24 + 1]))  # more than float32 can tell apart
    assert count.dtype == torch.int64 and count.item() == world * (2**24 + 1)
    everyone = gathered(x, list(range(world)), None)
    with tempfile.TemporaryDirectory() as folder:
        path = xm.rendezvous("path", str(folder).encode())[0].decode() + "/x.pt"
        if rank == 0:
            xm.save({"x": x}, path, master_only=False)  # waits for nobody: programs call it on one rank
        xm.rendezvous("saved")
        assert torch.load(path)["x"].shape == x.shape
        xm.rendezvous("loaded")
        xser = xla("utils.serialization")
        xser.save({"x": x, "of": [rank]}, path)
        xm.rendezvous("saved again")
        assert xser.load(path)["of"] == [0] and torch.equal(xser.load(path)["x"], everyone[0])
        xm.rendezvous("loaded")
    moved = xm.collective_permute(x, [[here, here + 1] for here in range(world - 1)])
    assert torch.equal(moved, everyone[rank - 1] if rank else torch.zeros_like(x))
    module = torch.nn.BatchNorm1d(3)
    torch.nn.init.constant_(module.weight, float(rank + 1))
    xm.broadcast_master_param(module)
    assert module.weight.tolist() == [1, 1, 1]
    tensors = [torch.full((2,), float("nan") if rank == 0 else float(rank))]
    xm.collective_broadcast(tensors, root_ordinal=1)
    assert tensors[0].tolist() == [1, 1]
    assert xm.rendezvous("here", b"x%d" % rank) == [b"x%d" % other for other in range(world)]
    assert xm.mesh_reduce("sum", {"loss": rank}, lambda all: sum(one["loss"] for one in all)) == sum(range(world))
    assert (xm.get_ordinal(), xm.xrt_world_size(), xm.is_master_ordinal(local=False)) == (rank, world, rank == 0)


def gradients() -> None:
    """As torch_xla, and averaged by an optimizer's step."""
    xm = xla("core.xla_model")
    rank, world = dist.get_rank(), dist.get_world_size()
    leaf = torch.ones(2, requires_grad=True)
    assert not xm.all_reduce(xm.REDUCE_SUM, leaf * 2).requires_grad  # no gradient passes
    (leaf * (rank + 1)).sum().backward()
    ended: list[int] = []
    xm.add_step_closure(ended.append, args=(1,))
    xm.optimizer_step(torch.optim.SGD([leaf], lr=1.0), barrier=True)
    mean = sum(range(1, world + 1)) / world
    assert torch.allclose(leaf.detach(), torch.full((2,), 1 - mean)) and ended == [1]


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_are_those_of_torch_distributed(world: int):
    run_ranks(each_collective, world, timeout=60)


def test_gradients_are_averaged_by_the_step_and_pass_no_collective():
    run_ranks(gradients, 2, timeout=60)


TRAINING = """
import json, os, sys
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_backend
import torch_xla.distributed.xla_multiprocessing as xmp

def mean(values):
    return sum(values) / len(values)

def work(index, rows):
    before = [xm.get_ordinal(), xm.get_local_ordinal(), xm.xrt_world_size(), xm.all_reduce("sum", torch.ones(1)).item()]
    torch.distributed.init_process_group("xla", init_method="xla://")
    torch.manual_seed(0)
    device, rank = xm.xla_device(), xm.get_ordinal()
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.rand(rows, 4).chunk(xm.xrt_world_size())[rank]
    losses = []
    for batch in pl.MpDeviceLoader([x] * 4, device):
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.add_step_closure(lambda loss: losses.append(xm.mesh_reduce("loss", loss.item(), mean)), (loss,))
    xm.save({"losses": losses, "before": before, "backend": torch.distributed.get_backend()}, sys.argv[1] + "/found.pt")
    xm.rendezvous("saved")

if __name__ == "__main__":
    xmp.spawn(work, args=(8,), nprocs=int(sys.argv[2]))
"""


def alone() -> list[float]:
    """The losses of plain PyTorch, in one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer, x, losses = torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(8, 4), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("launcher", "spawned", "ranks"),
    [
        pytest.param(["--standalone", "--nproc-per-node=2"], 1, 2, id="torchrun", marks=pytest.mark.smoke),
        pytest.param([], 2, 2, id="spawn"),
        pytest.param([], 1, 1, id="alone"),
    ],
)
def test_a_script_trains_as_plain_pytorch_does(launcher: list[str], spawned: int, ranks: int, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    run = ["-m", "torch.distributed.run", *launcher] if launcher else []
    command = [sys.executable, *run, "-m", "nxd_infer.compat", str(script), str(tmp_path), str(spawned)]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(command, env={**kept, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    assert found["losses"] == pytest.approx(alone(), abs=1e-6), json.dumps(found)
    assert found["before"] == [0, 0, ranks, ranks] and found["backend"] == "gloo"


TRAINER = """
import transformers
from nxd_infer import compat
compat.install()
import neuronx_distributed, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 2
args = TrainingArguments("out", max_steps=1, report_to="none", save_strategy="no")
Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows).train()
print(args.device)
"""


def test_the_trainer_of_transformers_that_was_imported_first_is_on_the_cpu(tmp_path: Path):
    kept = {name: value for name, value in os.environ.items() if name != "USE_TORCH_XLA"}
    run = [sys.executable, "-c", TRAINER]
    done = subprocess.run(run, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=250)
    assert done.stdout.endswith("cpu\n"), done.stderr[-3000:]
