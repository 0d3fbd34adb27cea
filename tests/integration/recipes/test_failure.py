"""What a job that fails leaves to the process in which it ran."""

from __future__ import annotations

import sys

import pytest

from nxd_infer.errors import RankFailedError
from nxd_infer.processes import ranks
from nxd_infer.recipes import loop
from nxd_infer.recipes.loop import Training, train
from nxd_infer.recipes.recipe import load
from tests.support.ranks import run_ranks
from tests.support.recipes.jobs import write, write_pairs
from tests.support.tiny_models import write_tiny


def trained_after_a_failure(file: str) -> int:
    """How many steps a process trains whose first job has failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "shutdown", lambda: None)  # the process group is the test's
        step = Training.train_step
        patch.setattr(Training, "train_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(load(file, ["exp_manager.name=first"]))
        patch.setattr(Training, "train_step", step)
        found: list[int] = []
        patch.setattr(Training, "_log_step", lambda self, _: found.append(self.step))
        train(load(file, ["exp_manager.name=second", "trainer.max_steps=2"]))
    return found[-1]


def test_a_process_trains_again_after_a_failure(tmp_path):
    write_tiny("llama", tmp_path / "model")
    write_pairs(tmp_path)
    assert run_ranks(trained_after_a_failure, 2, str(write(tmp_path, 2)), tp=1) == [2, 2]


def test_what_several_ranks_say_is_told_once(tmp_path):
    said = "import sys; print('of one\\nerror: of both\\nerror: of both', file=sys.stderr); sys.exit(1)"
    with pytest.raises(RankFailedError, match=r"ranks\.log:\nof one\nerror: of both\Z"):
        ranks.run_ranks([sys.executable, "-c", said], 1, tmp_path / "ranks.log", timeout=60)
