"""torch_xla for scripts, where it is not installed: the device "xla" is the CPU, in a world of one rank."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_infer import compat
from nxd_infer.errors import CollectiveError, DeviceOnlyError, ParallelConfigError

if PathFinder.find_spec("torch_xla") is not None:
    pytest.skip("torch_xla is installed, which compat never hides", allow_module_level=True)

CPU = torch.device("cpu")


def xla(name: str) -> Any:
    return importlib.import_module(f"torch_xla.{name}")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    before = compat.is_installed()  # by another module of tests in this process
    compat.install()
    importlib.import_module("torch_xla")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    compat.uninstall()
    if before:
        compat.install()


@pytest.mark.parametrize("device", ["xla", "xla:0", torch.device("xla"), torch.device("xla", 0)], ids=str)
def test_what_is_made_on_or_moved_to_the_device_is_on_the_cpu(device):
    x = torch.arange(4.0)
    made = [
        *(torch.zeros(2, device=device), torch.full((2,), 3.0, device=device), torch.arange(3, device=device)),
        *(torch.randn(2, 2, device=device), torch.empty_like(x, device=device), torch.eye(2, device=device)),
        *(torch.tensor([1, 2], device=device), torch.as_tensor([1.0], device=device), x.new_tensor([1], device=device)),
        *(x.new_zeros(2, device=device), x.to(device, torch.bfloat16), x.to(device=device), x.to(device)),
        *nn.Linear(2, 2, device=device).parameters(),
        *nn.Linear(2, 2, device="meta").to_empty(device=device).parameters(),
        *nn.BatchNorm1d(2).to(device).state_dict().values(),
    ]
    assert {tensor.device for tensor in made} == {CPU}
    assert torch.equal(x.to(device), x) and torch.full((2,), 3.0, device=device).tolist() == [3, 3]
    with torch.device(device):
        assert torch.ones(2).device == torch.tensor([1]).device == CPU
    leaf = torch.ones(2, requires_grad=True)
    (leaf.to(device, torch.float64) ** 2).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2, 2]


def test_code_that_is_compiled_or_exported_moves_tensors_as_before():
    class Moves(nn.Module):
        def forward(self, x):
            return x.to(torch.float64) + torch.tensor([1.0, 2.0])

    x = torch.ones(2)
    assert torch.equal(torch.compile(Moves(), backend="eager", fullgraph=True)(x), Moves()(x))
    assert torch.equal(torch.export.export(Moves(), (x,)).module()(x), Moves()(x))


def scripted(size: int) -> torch.Tensor:
    return torch.tensor([size, 2]) + torch.zeros(2, dtype=torch.int64).to(torch.int64)


def test_other_devices_are_those_of_new_tensors_as_before():
    with torch.device("meta"):
        made = [torch.tensor([1.0]), torch.as_tensor([1.0]), torch.asarray([1.0]), torch.ones(1)]
    assert all(tensor.is_meta for tensor in made)


def test_functions_can_be_pickled_as_before():
    for function in (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.to):
        assert pickle.loads(pickle.dumps(function)) is function


def test_torch_script_knows_the_functions():
    assert torch.jit.script(scripted)(1).tolist() == [1, 2]


def test_autocast_and_load_take_the_device(tmp_path: Path):
    amp = xla("amp")
    x = torch.ones(2, 2)
    for region in (
        torch.autocast("xla", dtype=torch.bfloat16),
        amp.autocast(torch.device("xla"), dtype=torch.bfloat16),
    ):
        with region:
            assert (x @ x).dtype == torch.bfloat16
    torch.save({"x": x}, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="xla")["x"], x)


def test_without_the_aliases_the_device_is_what_it_was():
    to = torch.Tensor.to
    compat.uninstall()
    assert torch.Tensor.to is not to and "to" not in vars(torch.Tensor) and "torch_xla" not in sys.modules
    for move in (lambda: torch.zeros(2, device="xla"), lambda: torch.ones(2).to("xla")):
        with pytest.raises((RuntimeError, NotImplementedError)):
            move()
    compat.install()
    importlib.import_module("torch_xla")
    assert torch.ones(2).to("xla").device == CPU


def test_a_script_that_imports_neuronx_distributed_has_the_device_too():
    compat.uninstall()
    compat.install()
    importlib.import_module("neuronx_distributed")
    assert torch.ones(2).to("xla").device == CPU


def test_one_rank_without_a_launcher(capsys: pytest.CaptureFixture[str]):
    xm, xr = xla("core.xla_model"), xla("runtime")
    assert xm.xla_device() == CPU and xm.xla_device(0) == CPU and xr.device_type() == xm.xla_device_hw("xla:0") == "CPU"
    assert (xm.xrt_world_size(), xm.get_ordinal(), xm.get_local_ordinal(), xr.world_size()) == (1, 0, 0, 1)
    assert xm.is_master_ordinal() and xm.is_master_ordinal(local=False) and xm.is_xla_tensor(torch.ones(1))
    leaf = torch.ones(2, requires_grad=True)
    xm.all_reduce(xm.REDUCE_SUM, leaf, scale=0.5).sum().backward()  # a copy, as torch_xla has it
    assert leaf.grad is not None and leaf.grad.tolist() == [1, 1]
    assert xm.all_gather(torch.ones(2)).tolist() == [1, 1] and xm.rendezvous("here", b"me") == [b"me"]
    xm.master_print("one line")
    assert capsys.readouterr().out == "one line\n"
    xm.set_rng_state(5)
    drawn = torch.rand(2, device="xla")
    assert xm.get_rng_state() == 5 and torch.equal(drawn, torch.manual_seed(5) and torch.rand(2))
    assert 0 < xm.get_memory_info()["bytes_used"] < xm.get_memory_info()["bytes_limit"]


@pytest.mark.parametrize("place", [{}, {"init_method": "xla://"}, {"world_size": 1, "rank": 0}], ids=str)
def test_a_process_group_of_one_rank_without_any_environment(place, monkeypatch: pytest.MonkeyPatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("xla", **place)
    assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
    group = dist.new_group([0], backend="xla", pg_options={"xla_pg_options": {"mesh": [[0]]}})
    x = torch.ones(2, device="xla")
    dist.all_reduce(x, group=group)
    assert x.tolist() == [1, 1]


def test_closures_run_where_a_step_ends():
    xm, loader = (
        importlib.import_module(f"torch_xla.{name}") for name in ("core.xla_model", "distributed.parallel_loader")
    )
    torch_xla, seen = importlib.import_module("torch_xla"), []
    xm.add_step_closure(lambda *args: seen.append(args), args=(1, "a"))
    xm.add_step_closure(seen.append, args=(2,), run_async=True)
    assert seen == []
    xm.mark_step()
    assert seen == [(1, "a"), 2]
    batches = [{"x": torch.full((1,), float(number))} for number in range(3)]
    loaded = loader.MpDeviceLoader(batches, xm.xla_device(), loader_prefetch_size=2)
    for batch in loaded:
        seen.append("batch")
        batch["x"] += 1  # its own copy
        xm.add_step_closure(seen.append, args=(batch["x"].item(),))
    assert seen[2:] == ["batch", 1, "batch", 2, "batch", 3] and len(loaded) == 3 and batches[2]["x"] == 2
    each = loader.ParallelLoader(batches, ["xla:0"], batches_per_execution=2).per_device_loader("xla:0")
    del seen[:]
    for _ in each:
        xm.add_step_closure(seen.append, args=("step",))
        seen.append("batch")
    assert seen == ["batch", "batch", "step", "step", "batch", "step"]
    with torch_xla.step():
        xm.add_step_closure(seen.append, args=("end",))
        assert seen[-1] == "step"
    assert seen[-1] == "end" and torch_xla.compile(lambda x: x + 1)(1) == 2


def test_what_the_cpu_cannot_be_told_is_refused_by_name():
    xm, loader = (
        importlib.import_module(f"torch_xla.{name}") for name in ("core.xla_model", "distributed.parallel_loader")
    )
    with pytest.raises(ParallelConfigError, match="device 3"):
        xm.xla_device(3)
    with pytest.raises(ParallelConfigError, match="input_sharding"):
        loader.MpDeviceLoader([], "xla", input_sharding=object())
    with pytest.raises(CollectiveError, match=r"\[\[1, 2\]\]"):
        xm.all_gather(torch.ones(2), groups=[[1, 2]])
    with pytest.raises(DeviceOnlyError, match=r"torch\.export"):
        xm.get_stablehlo()
    assert not hasattr(xm, "no_such_name") and not hasattr(sys.modules["torch_xla"], "no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch_xla.experimental.xla_sharding")
