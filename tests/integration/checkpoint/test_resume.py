"""Checkpoints: resuming at the same and at other degrees, being killed while saving, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_infer as nxd
from nxd_infer import comm
from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.checkpoint.async_save import Outstanding
from nxd_infer.checkpoint.storage import LocalStorage
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, NxdError, WeightMismatchError
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, AdamW, mine, trained_mlp, training
from tests.support.trainer.models import MLP, decoder, mlp, tokens, vectors

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
        weights = first[0].state_dict()
        same += [all(torch.equal(value, weights[name]) for name, value in other[0].state_dict().items())]
        found[tag] = same
    return {"losses": wanted, **found}


def resumed_elsewhere(root: str, options: dict[str, Any]) -> list[float]:
    parts = job(torch.float64, 2, options)
    assert nxd.load_checkpoint(root, None, *parts)["step"] == 3
    return go_on(parts, 3)


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
        for world, tp, options in ((4, 4, {}), (2, 1, ZERO1), (1, 1, {})):
            for losses in run_ranks(resumed_elsewhere, world, str(tmp_path), options, tp=tp):
                assert losses == pytest.approx(found[0]["losses"], rel=1e-9), (world, tp)


# --- killed -----------------------------------------------------------------------------------------------

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


def newest(root: str) -> Any:
    model, optimizer = training(mlp)
    return load_checkpoint(root, None, model, optimizer)


def test_one_rank_killed_while_saving(tmp_path: Path):
    assert run_ranks(one_rank_killed, 2, str(tmp_path), lost=(1,))[0] == "told"
    assert run_ranks(newest, 2, str(tmp_path)) == ["whole"] * 2


# --- in one process ---------------------------------------------------------------------------------------


class Held(torch.nn.Module):
    def __init__(self, value: torch.Tensor):
        super().__init__()
        self.register_buffer("held", value)


TYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
OTHERS = ["float8_e4m3fn", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fnuz"]


@pytest.mark.parametrize("name", [*TYPES, *OTHERS])
def test_every_type_comes_back_or_is_refused_when_it_is_saved(tmp_path: Path, name: str):
    """Never a checkpoint that says later that it cannot be read. Only what is cut into slices may be refused."""
    value = torch.tensor([1, 0, 1, 1]).to(getattr(torch, name))
    save_checkpoint(tmp_path, "content", user_content=[value])
    found = load_checkpoint(tmp_path, "content")
    model, other = Held(value), Held(torch.zeros_like(value))
    if name in OTHERS[1:]:
        with pytest.raises(CheckpointError, match=f"torch.{name}"):
            save_checkpoint(tmp_path, "model", model)
        assert [path.name for path in tmp_path.iterdir()] == ["content"]
    else:
        save_checkpoint(tmp_path, "model", model)
        load_checkpoint(tmp_path, "model", model=other)
        found.append(other.get_buffer("held"))
    for one in found:
        assert one.dtype == value.dtype and torch.equal(one.view(torch.uint8), value.view(torch.uint8))


def test_tags_and_what_is_kept(tmp_path: Path):
    model = MLP()
    assert not has_checkpoint(tmp_path)
    for step in range(4):
        save_checkpoint(tmp_path, tag=f"step_{step}", model=model, user_content={"step": step}, num_kept_ckpts=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]
    os.utime(tmp_path / "step_3" / "manifest.json", (1, 1))
    os.utime(tmp_path / "step_3", (1, 1))
    assert load_checkpoint(tmp_path)["step"] == 3  # by its number, whatever the clock says
    save_checkpoint(tmp_path, model=model, user_content="no tag")
    save_checkpoint(tmp_path, model=model, num_kept_ckpts=-1, use_xser=True, num_workers=64)  # no limit, not looked at
    assert load_checkpoint(tmp_path, model=model) is None and load_checkpoint(tmp_path, "step_2")["step"] == 2
    (tmp_path / "step_3" / "done").unlink()
    assert has_checkpoint(tmp_path, "step_2") and not has_checkpoint(tmp_path, "step_3")
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint with the tag 'step_3'; complete are: 'step_2', ''"
    ):
        load_checkpoint(tmp_path, "step_3")


def test_an_asynchronous_save_keeps_what_was(tmp_path: Path):
    model, optimizer = trained_mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        save_checkpoint(tmp_path, f"step_{step}", model, optimizer, user_content=step, async_save=True)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    wait_for_save()
    for step in range(3):
        other, fresh = training(mlp, seed=5)
        assert load_checkpoint(tmp_path, f"step_{step}", other, fresh) == step
        for name, value in other.state_dict().items():
            torch.testing.assert_close(value, before[name] + step)
    assert load_checkpoint(tmp_path) == 2


def test_the_process_ends_when_its_save_is_whole(tmp_path: Path):
    code = (
        "import torch, sys; from nxd_infer.checkpoint.api import save_checkpoint; "
        "save_checkpoint(sys.argv[1], 'last', torch.nn.Linear(300, 300), user_content=1, async_save=True)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=600)
    assert load_checkpoint(tmp_path, model=torch.nn.Linear(300, 300)) == 1


def test_an_asynchronous_failure_is_raised_once(tmp_path: Path):
    def fail() -> None:
        raise OSError("the disk is full")

    save = Outstanding()
    (tmp_path / "saving").mkdir()
    save.start(LocalStorage(tmp_path), "saving", 3, fail)
    with pytest.raises(CheckpointError, match="the last asynchronous save failed: the disk is full"):
        save.wait()
    save.wait()
    assert (tmp_path / "saving" / "rank_00003.failed").read_text() == "the disk is full"


def test_states_given_as_dictionaries(tmp_path: Path):
    model, optimizer = trained_mlp()
    states = model.state_dict(), optimizer.state_dict()
    save_checkpoint(tmp_path, "dicts", *states, zero1_optimizer=True)
    other, fresh = training(mlp, seed=5)
    load_checkpoint(tmp_path, "dicts", other, fresh)
    for parts in ((model, optimizer), (other, fresh)):
        parts[0].run_train(**vectors())
        parts[1].step()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


def test_a_checkpoint_of_another_model(tmp_path: Path):
    model, optimizer = trained_mlp()
    save_checkpoint(tmp_path, "a", model, optimizer)
    wider = MLP(hidden=32)
    with pytest.raises(WeightMismatchError, match=r"up.weight is \[24, 16\], wanted \[24, 32\]"):
        load_checkpoint(tmp_path, "a", wider)
    with pytest.raises(WeightMismatchError, match=r"missing: 0.weight, 0.bias; unexpected: down.bias"):
        load_checkpoint(tmp_path, "a", torch.nn.Sequential(torch.nn.Linear(2, 2)))
    foreign = nxd.initialize_parallel_optimizer(
        nxd.neuronx_distributed_config(), AdamW, [("other", torch.nn.Parameter(torch.ones(2)))], lr=1.0
    )
    with pytest.raises(WeightMismatchError, match="missing: other"):
        load_checkpoint(tmp_path, "a", optimizer=foreign)
    plain = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="parallel optimizer, which a AdamW cannot take"):
        load_checkpoint(tmp_path, "a", optimizer=plain)
    with pytest.raises(CheckpointError, match="holds no scheduler"):
        load_checkpoint(tmp_path, "a", scheduler=torch.optim.lr_scheduler.StepLR(plain, 1))


def test_loading_a_part(tmp_path: Path):
    save_checkpoint(tmp_path, "a", model=torch.nn.Sequential(torch.nn.Linear(2, 2)))
    added = torch.nn.Linear(2, 3)
    grown = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), added)
    kept = added.weight.detach().clone()
    with pytest.raises(WeightMismatchError, match=r"missing: 1.weight, 1.bias; unexpected: 0.bias \[2\]"):
        load_checkpoint(tmp_path, "a", grown)
    load_checkpoint(tmp_path, "a", grown, strict=False)
    assert torch.equal(added.weight, kept)


def test_a_path_that_is_a_file(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match=r"file cannot be read or written: .*File exists"):
        save_checkpoint(path, "a", MLP())
    for tag in (None, "a"):
        with pytest.raises(CheckpointError, match="file is a file; give the folder that save_checkpoint"):
            load_checkpoint(path, tag)
    assert path.read_text() == "mine" and not has_checkpoint(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"user_content": {"a": [object()]}}, r"user_content\['a'\]\[0\] is a object, .* it takes tensors"),
        ({"tag": "../a"}, "cannot be a tag"),
        ({"tag": "theirs"}, "exists and is not a checkpoint; it is left alone"),
        ({"num_workers": 33}, "num_workers must be a whole number from 1 to 32, got 33"),
        ({"num_kept_ckpts": 0}, "num_kept_ckpts must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, arguments: dict[str, Any], message: str):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, **arguments)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes.txt", "theirs"]
