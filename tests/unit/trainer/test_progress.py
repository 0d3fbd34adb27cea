"""What a training loop shows: lines, a bar, and scalars read back."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from nxd_infer.errors import MissingPackageError, ParallelConfigError
from nxd_infer.trainer import TensorBoardLogger, TrainingProgress
from tests.support.trainer.jobs import training
from tests.support.trainer.models import tokens

DOCS = Path(__file__).parents[3] / "docs/training.md"
ALWAYS = 1e-9
"""Seconds between lines: one a step."""


def output(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=160, highlight=False), text


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every (step, value) in the event files of a folder, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_lines_where_there_is_no_terminal():
    console, text = output(terminal=False)
    with TrainingProgress(total=6, initial=2, line_every=ALWAYS, console=console) as progress:
        for loss in (2.5, torch.tensor(1.25, requires_grad=True)):
            progress.step(loss, tokens=64, bubble=None if loss == 2.5 else 0.126)
    first, second, last = text.getvalue().splitlines()
    assert first.startswith("training 50%  step 3/6  loss 2.5  ") and first.endswith(" left") and "bubble" not in first
    assert second.startswith("training 67%  step 4/6  loss 1.25  ") and "tokens/s  bubble 13%  " in second
    assert last.startswith("training 67%  step 4/6  loss 1.25  "), "where it stopped"
    assert progress.steps == 4


def test_quiet_between_lines():
    console, text = output(terminal=False)
    with TrainingProgress(console=console, line_every=3600, description="tuning") as progress:
        for _ in range(100):
            progress.step(1.0)
        assert text.getvalue() == "tuning  step 1  loss 1\n", "a sign of life"
    progress.close()
    assert text.getvalue() == "tuning  step 1  loss 1\ntuning  step 100  loss 1\n"


def test_a_bar_on_a_terminal():
    console, text = output(terminal=True)
    with TrainingProgress(total=2, console=console) as progress:
        progress.step(3.0, tokens=10)
        progress.step(2.0, tokens=10)
    assert "100%" in text.getvalue() and "step 2/2  loss 2 " in text.getvalue() and "0:00:00 left" in text.getvalue()


def test_a_time_instead_of_steps():
    for seconds, share, left in ((1e9, "0%", "days"), (1e-9, "100%", "0:00:00")):
        console, text = output(terminal=False)
        with TrainingProgress(seconds=seconds, console=console) as progress:
            progress.step(1.0)
        last = text.getvalue().splitlines()[-1]
        assert last.startswith(f"training {share}  step 1  loss 1  ")
        assert left in last and last.endswith(" left")


def test_the_documented_loop(tmp_path: Path, monkeypatch, capsys):
    loop = r"```python\n(from nxd_infer.parallel_state [^`]*?TrainingProgress[^`]*?)```"
    (block,) = re.findall(loop, DOCS.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model, optimizer = training()
    exec(block, {"model": model, "optimizer": optimizer, "data": [tokens(), tokens()]})
    assert "step 2/1000" in capsys.readouterr().err
    found = scalars(tmp_path / "runs/first")
    assert sorted(found) == ["grad_norm", "loss", "tokens_per_second"]
    assert found["loss"][1][1] < found["loss"][0][1] and found["grad_norm"][0][1] > 0


def test_scalars_are_those_that_were_given(tmp_path: Path):
    console, _ = output(terminal=False)
    with TrainingProgress(log_dir=tmp_path, log_every=2, console=console) as progress:
        for step in range(1, 7):
            progress.step(torch.tensor(1.0 / step), tokens=100, grad_norm=None if step == 4 else step / 4)
    found = scalars(tmp_path)
    assert found["loss"] == [(2, 0.5), (4, 0.25), (6, pytest.approx(1 / 6))]
    assert found["grad_norm"] == [(2, 0.5), (6, 1.5)]
    assert [step for step, speed in found["tokens_per_second"] if speed > 0] == [2, 4, 6]


def test_a_resumed_job_hides_what_was_written_after_its_checkpoint(tmp_path: Path):
    """And what was flushed is there though the first job was killed."""
    first = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        first.log(step, loss=10.0)
    first.flush()
    assert scalars(tmp_path)["loss"] == [(1, 10.0), (2, 10.0), (3, 10.0)]
    first.close()
    second = TensorBoardLogger(tmp_path, initial=1)
    second.log(2, loss=5.0)
    second.close()
    assert scalars(tmp_path)["loss"] == [(1, 10.0), (2, 5.0)]


def test_without_the_package_there_is_a_hint(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as Python marks what cannot be imported
    with pytest.raises(MissingPackageError, match=r"pip install 'nxd-infer\[train\]'") as caught:
        TrainingProgress(log_dir=tmp_path / "runs")
    assert caught.value.name == "tensorboard" and isinstance(caught.value, ImportError)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("bad", [{"total": 3, "initial": 3}, {"seconds": 0}, {"log_every": 0}, {"line_every": -1}])
def test_impossible_options(bad):
    with pytest.raises(ParallelConfigError, match=r"must be above \d"):
        TrainingProgress(**bad)
