"""Recipes of a few steps on tiny models, and what their ranks return."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from nxd_infer.context import make_context, use_context
from nxd_infer.recipes.loop import Training
from nxd_infer.recipes.prepare import prepare
from nxd_infer.recipes.recipe import load

TINY = """name: tiny
seed: 7
trainer: {{devices: {devices}, max_steps: 4, enable_progress_bar: false}}
exp_manager: {{exp_dir: {folder}/experiments, create_tensorboard_logger: false, create_checkpoint_callback: false}}
data: {{train_dir: {folder}/data.jsonl, micro_batch_size: 1, global_batch_size: 4, seq_length: 48}}
model:
  model_config: {folder}/model
  optim: {{lr: 1e-3, sched: {{warmup_steps: 1}}}}
precision: {{type: fp32}}
"""


def write(folder: Path, devices: int = 1, more: str = "") -> Path:
    file = folder / f"tiny_{devices}_{abs(hash(more))}.yaml"
    file.write_text(TINY.format(folder=folder, devices=devices) + more)
    return file


def write_pairs(folder: Path, count: int = 24) -> None:
    """Prompts and answers, of different lengths."""
    rows = [
        {"prompt": f"{number} and {number}? ", "completion": f"{2 * number} " * (1 + number % 5)}
        for number in range(count)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def begun(file: str | Path, overrides: Sequence[str] = (), log_dir: Path | None = None) -> Iterator[Training]:
    """A job in the context in force, whose logs are closed behind the block."""
    loaded = load(file, overrides)
    training = Training(loaded, prepare(loaded, Path(file).parent / "prepared"), log_dir)
    yield training
    training.logs.close()


def losses_on_a_rank(file: str, overrides: list[str], steps: int) -> list[float]:
    """Of the first steps the losses, the tokens, and the sums of the documents' squared lengths; then the norm of the
    parameters."""
    with begun(file, overrides, Path(file).parent / "log") as training:
        found: list[float] = []
        for batch in itertools.islice(training.loader, steps):
            step = training.train_step(batch)
            found += [float(step.loss), float(step.tokens), float(step.squares)]
        return [*found, float(training.parameter_norm())]


def alone(file: Path, overrides: Sequence[str] = (), steps: int = 3) -> list[float]:
    """The same of one rank, in this process."""
    with use_context(make_context()):
        return losses_on_a_rank(str(file), [*overrides], steps)
