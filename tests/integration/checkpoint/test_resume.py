"""Training on ranks goes on from a checkpoint, at the same and other degrees; jobs that are killed while they save."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer import comm
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, NxdError
from nxd_infer.trainer.data import ResumableLoader
from tests.support.checkpoint import stories
from tests.support.checkpoint.stories import same_weights, stepped
from tests.support.e2e.command import here
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, mine, training
from tests.support.trainer.models import MLP, decoder, mlp, tokens

Job = tuple[Any, Any, Any]


def job(dtype: torch.dtype, seed: int, options: dict[str, Any]) -> Job:
    """A model with heads that are padded and replicated, its optimizer, and a schedule."""
    model, optimizer = training(partial(decoder, "odd_heads", dtype), seed=seed, **options)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def go_on(parts: Job, count: int) -> list[float]:
    """Train; the losses over all data-parallel ranks."""
    model, optimizer, scheduler = parts
    losses = []
    for _ in range(count):
        loss = model.run_train(**mine(tokens())).double()
        losses.append(float(comm.all_reduce(loss, current_context(), "dp") / current_context().dp.degree))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def saved_and_resumed(root: str, dtype: torch.dtype) -> dict[str, Any]:
    first = job(dtype, 0, ZERO1)
    go_on(first, 3)
    config = first[0].nxd_config
    content = {"step": 3, "seen": torch.arange(4), "names": ("a", None, 1.5, float("inf"))}
    named = dict(zip(("model", "optimizer", "scheduler"), first, strict=True))
    nxd.save_checkpoint(root, "sync", **named, user_content=content, nxd_config=config, num_workers=1)
    nxd.save_checkpoint(root, "async", **named, user_content=content, async_save=True, use_xser=True)
    drawn = torch.rand(3)
    wanted = go_on(first, 3)  # beside the save
    found = {}
    for tag in ("sync", "async"):
        other = job(dtype, 1, ZERO1)
        torch.manual_seed(99)
        got = nxd.load_checkpoint(root, tag, *other, num_workers=3)
        same = [torch.equal(torch.rand(3), drawn), got["names"] == content["names"], got["step"] == 3]
        same += [torch.equal(got["seen"], content["seen"]), other[2].last_epoch == 3]
        same += [go_on(other, 3) == wanted, other[1].param_groups[0]["lr"] == first[1].param_groups[0]["lr"]]
        found[tag] = [*same, same_weights(first[0], other[0])]
    return {"losses": wanted, **found}


def resumed_elsewhere(root: str, options: dict[str, Any]) -> list[float]:
    parts = job(torch.float64, 2, options)
    assert nxd.load_checkpoint(root, None, *parts)["step"] == 3
    return go_on(parts, 3)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_training_goes_on(tmp_path: Path, dtype: torch.dtype):
    """Bit by bit at the degrees of the save, to 1e-9 at any others; in bfloat16 with float32 masters."""
    found = run_ranks(saved_and_resumed, 4, str(tmp_path), dtype, tp=2)
    for rank in found:
        assert rank["sync"] == rank["async"] == [True] * 8
        assert rank["losses"] == found[0]["losses"]
    tensors = {path.name for path in (tmp_path / "sync").glob("*.safetensors")}
    assert len(tensors) == 2 + 4 + 4  # a model a tensor-parallel rank, an optimizer and a random state a rank
    for name in tensors:
        assert (tmp_path / "sync" / name).read_bytes() == (tmp_path / "async" / name).read_bytes(), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["async", "sync"]
    if dtype == torch.float64:
        for world, tp, options in ((4, 4, {}), (2, 1, ZERO1)):
            for losses in run_ranks(resumed_elsewhere, world, str(tmp_path), options, tp=tp):
                assert losses == pytest.approx(found[0]["losses"], rel=1e-9), (world, tp)


def a_rate_in_sharded_files(root: str, zero1: bool) -> None:
    model, optimizer, schedule = stories.job("cosine", zero1)
    stories.go_on((model, optimizer, schedule), 1)
    optimizer.save_sharded_state_dict(root)
    other = stories.job("cosine", zero1, seed=2, lr=0.25)[1]
    other.load_sharded_state_dict(root)
    assert other.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"]
    assert other.param_groups[1]["lr"].dtype == torch.float64


class Refusing:
    def state_dict(self) -> Any:
        raise ValueError("no state yet")


def all_or_none(root: str, zero1: bool) -> None:
    """Rank 1 has saved no position in the data, so it finds none; then it cannot save its own."""
    first = current_context().rank == 0
    save_checkpoint(root, "a", *stepped(), dataloader=ResumableLoader([1, 2]) if first else None)
    other, fresh = training(mlp, seed=3)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    loader = ResumableLoader([1, 2])
    with pytest.raises(CheckpointError, match="because another rank" if first else "holds no position in the data"):
        load_checkpoint(root, "a", other, fresh, dataloader=loader)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert not fresh.state
    with pytest.raises(Exception, match="because another rank" if first else "no state yet"):
        save_checkpoint(root, "b", other, dataloader=loader if first else Refusing())
    assert os.listdir(root) == ["a"]


@pytest.mark.parametrize(
    "story",
    [
        *(stories.schedules_go_on, stories.masters_are_the_weights, stories.others_are_refused),
        *(a_rate_in_sharded_files, all_or_none),
    ],
)
def test_over_two_ranks(tmp_path: Path, story: Callable[[str, bool], None]):
    run_ranks(story, 2, str(tmp_path), True, tp=1)


class Counting(nn.Module):
    def __init__(self, seen: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = seen

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"] if torch.equal(state["mean"], torch.full((2,), float(state["seen"]))) else -1


def extra_of(root: str) -> list[Any]:
    """What a rank finds again at the degrees of the save, if it saves its rank, and if it saves 5."""
    found = []
    for folder, seen in (("own", current_context().rank), ("same", 5)):
        save_checkpoint(f"{root}/{folder}", "a", nn.Sequential(Counting(seen)))
        other = nn.Sequential(Counting())
        load_checkpoint(f"{root}/{folder}", "a", other)
        found.append(other[0].seen)
    return found


def test_modules_with_an_extra_state(tmp_path: Path):
    """It comes back to each rank; at other degrees where it is the same on all; and is never lost in silence."""
    assert run_ranks(extra_of, 2, str(tmp_path), tp=1) == [[0, 5], [1, 5]]
    model = nn.Sequential(Counting())
    with pytest.raises(CheckpointError, match="holds another extra state of modules for each rank"):
        load_checkpoint(tmp_path / "own", "a", model)
    load_checkpoint(tmp_path / "own", "a", model, strict=False)
    assert model[0].seen == 0
    load_checkpoint(tmp_path / "same", "a", model)
    assert model[0].seen == 5
    reshard = partial(here, "ckpt", "reshard")
    assert reshard(tmp_path / "same", tmp_path / "one", "--tp", 1, "--dp", 1).status == 0
    model[0].seen = 0
    load_checkpoint(tmp_path / "one", "a", model)
    assert model[0].seen == 5
    assert "extra_state is left out" in reshard(tmp_path / "own", tmp_path / "two", "--tp", 1, "--dp", 1).out
    save_checkpoint(tmp_path, "without", nn.Sequential(nn.RMSNorm(2)))
    with pytest.raises(CheckpointError, match=r"holds no extra state of modules; .* pass strict=False"):
        load_checkpoint(tmp_path, "without", model)


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def die_at(number: int) -> None:
    """Kill this process by SIGKILL when it is about to touch the file system for the ``number``-th time."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in CHANGES:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_everywhere(folder: str, same_tag: bool) -> list[tuple[str, list[str]]]:
    """Save in a forked process that is killed at its first, second, ... step, until one gets through.

    What replaces a checkpoint of its own tag is saved asynchronously.
    """
    root, model, weights = Path(folder), MLP(), MLP()
    save_checkpoint(root / "start", "old", model, user_content="old")
    old = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    found = []
    for number in range(1, 500):
        path = root / str(number)
        shutil.copytree(root / "start", path)
        child = os.fork()
        if child == 0:
            die_at(number)
            tag = "old" if same_tag else "new"
            save_checkpoint(path, tag, model, user_content="new", num_kept_ckpts=1, async_save=same_tag)
            wait_for_save()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        content = load_checkpoint(path, model=weights)
        wanted = old if content == "old" else model.state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in weights.state_dict().items())
        save_checkpoint(path, "after", model, user_content="after", num_kept_ckpts=2)
        assert load_checkpoint(path) == "after"
        found.append((content, sorted(p.name for p in path.iterdir())))
        shutil.rmtree(path)
        if status == 0:
            return found
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("no save got through")


@pytest.mark.parametrize("same_tag", [False, True])
def test_killed_at_every_step_of_saving(tmp_path: Path, same_tag: bool):
    """The old checkpoint or the new one is there, whole, and the next save tidies up."""
    ((found),) = run_ranks(killed_everywhere, 1, str(tmp_path), same_tag)
    contents = [content for content, _ in found]
    assert len(found) > 20 and contents == sorted(contents, reverse=True)  # old, ..., old, new, ..., new
    assert contents[0] == "old" and contents.count("new") > 3
    newest = "old" if same_tag else "new"
    for content, names in found:
        assert len(names) == 2 and "after" in names
        assert newest in names or content == "old"


def one_rank_killed(root: str) -> str:
    model, optimizer = training(mlp)
    save_checkpoint(root, "whole", model, optimizer, user_content="whole")
    if current_context().rank == 1:
        die_at(4)
    try:
        save_checkpoint(root, "broken", model, optimizer)
    except NxdError:
        return "told"
    return "saved"


def test_one_rank_killed_while_saving(tmp_path: Path):
    assert run_ranks(one_rank_killed, 2, str(tmp_path), lost=(1,))[0] == "told"
    assert load_checkpoint(tmp_path) == "whole"


FAILING = """
import atexit, resource, sys, torch
from nxd_infer.checkpoint.api import save_checkpoint
atexit.register(lambda: print("cleaned up"))
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))  # as a disk that is full
save_checkpoint(sys.argv[1], "big", torch.nn.Linear(300, 300), async_save=True)
print("training goes on")
"""


def test_a_failed_last_save_is_no_success(tmp_path: Path):
    """Without a call that waits: the process ends with an error, after its own clean-up, and older checkpoints stay."""
    save_checkpoint(tmp_path, "first", nn.Linear(3, 3), user_content=1)
    command = [sys.executable, "-c", FAILING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stdout == "training goes on\ncleaned up\n", done
    assert "the last asynchronous save failed" in done.stderr and str(tmp_path) in done.stderr
    assert load_checkpoint(tmp_path) == 1 and [path.name for path in tmp_path.iterdir()] == ["first"]
