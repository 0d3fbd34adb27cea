"""Recipes of a few steps on tiny models, and what their ranks return."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

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


def losses_on_a_rank(file: str, overrides: list[str], steps: int) -> list[float]:
    """Of the first steps the losses, the tokens, and the sums of the documents' squared lengths; then the norm of the
    parameters."""
    loaded = load(file, overrides)
    training = Training(loaded, prepare(loaded, Path(file).parent / "prepared"), Path(file).parent / "log")
    found: list[float] = []
    for batch in itertools.islice(training.loader, steps):
        step = training.train_step(batch)
        found += [float(step.loss), float(step.tokens), float(step.squares)]
    found.append(float(training.parameter_norm()))
    training.logs.close()
    return found


def alone(file: Path, overrides: Sequence[str] = (), steps: int = 3) -> list[float]:
    """The same of one rank, in this process."""
    with use_context(make_context()):
        return losses_on_a_rank(str(file), [*overrides], steps)


def trained_lora(file: str) -> tuple[float, list[str]]:
    """Train adapters to the end; the largest difference between the model and what it wrote, and what was trained."""
    from nxd_models import registry

    loaded = load(file)
    training = Training(loaded, prepare(loaded, Path(file).parent / "prepared"), None)
    trained = [name for name, param in training.job.model.named_parameters() if param.requires_grad]
    outcome = training.run()
    ids = torch.arange(5, 25)[None]
    training.job.model.eval()
    with torch.no_grad():
        here = training.job.model(ids)
        there = registry.load_model(outcome.model, "generate", torch.float32)(ids)
    training.logs.close()
    return float((here - there).abs().max()), trained


def last_loss(file: str, overrides: list[str]) -> float:
    """Train to the end, and return the last step's loss."""
    loaded = load(file, overrides)
    training = Training(loaded, prepare(loaded, Path(file).parent / "prepared"), None)
    training.run()
    training.logs.close()
    return training.metrics["train_loss"]
