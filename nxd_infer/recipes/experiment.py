"""The experiment manager: the folder of a job, which checkpoints it saves and keeps, when it ends early.

Source: NeMo's ``exp_manager``. ``exp_dir/name/version_0`` has ``checkpoints/``, the logs, and the recipe.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nxd_infer.checkpoint import folder as folders
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.errors import RecipeError
from nxd_infer.recipes.recipe import Loaded
from nxd_infer.recipes.schema import CheckpointCallback, EarlyStopping, ExpManager, Trainer

EXPERIMENTS, PREPARED, CHECKPOINTS, SCORES = "nxd_experiments", "prepared", "checkpoints", "scores.json"
_VERSION = re.compile(r"version_\d+|\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
_FIELD = re.compile(r"\{(\w+)(?:[:=]([^}]*))?\}")


def root_of(manager: ExpManager) -> Path:
    """Return the folder of all versions of an experiment."""
    if manager.explicit_log_dir is not None:
        return Path(manager.explicit_log_dir)
    return Path(manager.exp_dir or EXPERIMENTS) / manager.name


def log_dir_of(manager: ExpManager) -> Path:
    """Return the folder of this job: the newest version with ``resume_if_exists``, else a new one. One rank asks."""
    root = root_of(manager)
    if manager.explicit_log_dir is not None:
        return root
    if manager.version is not None:
        return root / manager.version
    there = [one for one in root.iterdir() if one.is_dir()] if root.is_dir() else []
    versions = sorted((one for one in there if _VERSION.fullmatch(one.name)), key=lambda one: (len(one.name), one.name))
    if manager.resume_if_exists and versions:
        return versions[-1]
    if manager.use_datetime_version:
        return root / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    numbers = [int(one.name.removeprefix("version_")) for one in versions if one.name.startswith("version_")]
    return root / f"version_{max(numbers, default=-1) + 1}"


def write_recipe(loaded: Loaded, log_dir: Path) -> None:
    """Keep the recipe as it was read, with its references resolved, and the files that it wants kept."""
    log_dir.mkdir(parents=True, exist_ok=True)
    (log_dir / "recipe.json").write_text(json.dumps(loaded.tree.values, indent=1, default=str))
    for file in copied_files(loaded):
        shutil.copy(file, log_dir / file.name)


def copied_files(loaded: Loaded) -> list[Path]:
    """Return the files that a recipe wants kept. Raises RecipeError if one is not there."""
    files = [loaded.path(text) for text in loaded.recipe.exp_manager.files_to_copy]
    for file in files:
        if not file.is_file():
            raise loaded.tree.error("exp_manager.files_to_copy", f"names {file}, which is not a file")
    return files


def checkpoint_name(callback: CheckpointCallback, numbers: Mapping[str, float]) -> str:
    """Return the name of a checkpoint: ``x--{step}-{val_loss:.2f}`` becomes ``x--step=7-val_loss=1.25``."""

    def written(match: re.Match[str]) -> str:
        name, form = match[1], match[2] or ""
        value = numbers.get(name, math.nan)
        text = format(int(value) if float(value).is_integer() and not form else value, form)
        return f"{name}={text}" if callback.auto_insert_metric_name else text

    try:
        found = _FIELD.sub(written, callback.filename)
    except ValueError as error:
        raise RecipeError(f"checkpoint_callback_params.filename = {callback.filename!r}: {error}") from None
    return found.replace("/", "_")


def watches_loss(manager: ExpManager) -> bool:
    """Return whether a checkpoint's rank or name, or an early end, depends on the loss of every step."""
    callback = manager.checkpoint_callback_params
    ends = manager.create_early_stopping_callback and manager.early_stopping_callback_params.monitor
    return any("train_loss" in str(one) for one in (callback.monitor, callback.filename, ends))


def saves(callback: CheckpointCallback, step: int, ended: int | None, late: bool, validated: bool) -> bool:
    """Return whether a checkpoint is due after a step.

    ``ended``: the number of the epoch, from 1, that ends with it; None within one. ``late``: ``train_time_interval``
    has passed since the last one. ``validated``: the step ended with a validation.
    """
    steps, epochs = callback.every_n_train_steps, callback.every_n_epochs
    if not (steps or epochs or callback.train_time_interval):
        return validated
    return late or bool(steps and step % steps == 0) or bool(epochs and ended and ended % epochs == 0)


def validates(trainer: Trainer, step: int, epoch: int, ended: int | None, last: bool) -> bool:
    """Return whether a validation is due after a step.

    ``epoch``: steps of one; ``ended``: as for :func:`saves`. ``last``: no step follows, and the last checkpoint is
    named and ranked by its own loss.
    """
    epochs, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    if last and (epochs or interval):
        return True
    if epochs and ended and ended % epochs == 0:
        return True
    share = isinstance(interval, float) and interval <= 1  # 1.0 is an epoch, 1 is every step
    every = 0 if not interval else max(1, round(interval * epoch)) if share else int(interval)
    return bool(every) and step % every == 0


@dataclass
class Keeper:
    """Says which checkpoints of a folder stay: the best ``save_top_k``, and the newest with ``save_last``."""

    callback: CheckpointCallback
    log_dir: Path
    scores: dict[str, float] = field(default_factory=dict)
    """What each checkpoint was saved with, oldest first."""

    def __post_init__(self) -> None:
        path = self.log_dir / SCORES
        if path.is_file():
            self.scores = json.loads(path.read_text())

    @property
    def folder(self) -> Path:
        return Path(self.callback.dirpath) if self.callback.dirpath else self.log_dir / CHECKPOINTS

    @property
    def newest(self) -> str:
        """What messages call the checkpoint that a job goes on from; the folder where NxD's own are in it."""
        there = folders.complete_checkpoints(storage_of(self.folder))
        return there[-1].where if there else str(self.folder)

    def add(self, tag: str, score: float) -> None:
        """Note a checkpoint that is about to be saved. One rank calls it."""
        self.scores.pop(tag, None)
        self.scores[tag] = score
        building = self.log_dir / f".{SCORES}"
        building.write_text(json.dumps(self.scores))
        building.replace(self.log_dir / SCORES)

    def prune(self) -> None:
        """Remove the checkpoints that do not stay; those that are complete alone count."""
        storage = storage_of(self.folder)
        there = [one.tag for one in folders.complete_checkpoints(storage)]
        if self.callback.save_top_k <= 0 or not there:  # all stay; or none was saved
            return
        worst = -math.inf if self.callback.mode == "max" else math.inf

        def rank(tag: str) -> tuple[float, int]:
            score = self.scores.get(tag, worst)
            score = worst if math.isnan(score) else score
            return (score if self.callback.mode == "max" else -score), there.index(tag)

        stay = set(sorted(there, key=rank)[-self.callback.save_top_k :])
        if self.callback.save_last:
            stay.add(there[-1])
        for tag in there:
            if tag not in stay:
                folders.remove(storage, tag)


@dataclass
class Patience:
    """Says when a metric no longer improves."""

    options: EarlyStopping
    best: float = math.nan
    waited: int = 0

    def stops(self, value: float) -> bool:
        """Take a new value; return whether the training shall end."""
        if self.options.check_finite and not math.isfinite(value):
            return True
        gain = (value - self.best) * (1 if self.options.mode == "max" else -1)
        if math.isnan(self.best) or gain > self.options.min_delta:
            self.best, self.waited = value, 0
            return False
        self.waited += 1
        return self.waited >= self.options.patience
