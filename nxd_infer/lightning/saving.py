"""Lightning's checkpoints as those of save_checkpoint: weights and optimizer by rank, the rest as user contents."""

from __future__ import annotations

import logging
import os
from typing import Any

from lightning.pytorch import LightningModule

from nxd_infer.checkpoint import folder as folders
from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.values import pack

log = logging.getLogger(__name__)

VERSION = "pytorch-lightning_version"
"""A key that every checkpoint of a Trainer has."""
HPARAMS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningModule.CHECKPOINT_HYPER_PARAMS_NAME)


class Checkpoints:
    """Saves and loads a Trainer's checkpoints. One that is removed while a save is written is removed after it."""

    def __init__(self, use_xser: bool, async_save: bool):
        self.use_xser, self.async_save = use_xser, async_save
        self._unwanted: list[str] = []

    def save(self, module: Any, optimizer: Any, content: dict[str, Any], path: str) -> None:
        """Save under ``path``, all or nothing. Raises CheckpointError."""
        self.finish()
        folder, tag = os.path.split(path)
        kept = {name: value for name, value in content.items() if name != "optimizer_states"}
        for name in HPARAMS:
            if isinstance(kept.get(name), dict):
                kept[name] = _storable(kept[name])
        save_checkpoint(
            folder or ".",
            tag,
            module.model,
            optimizer,
            user_content=kept,
            use_xser=self.use_xser,
            async_save=self.async_save,
        )

    def load(self, module: Any, optimizer: Any, path: str) -> dict[str, Any]:
        """Load the model, and the optimizer if there is one; return the rest. Raises CheckpointError."""
        folder, tag = (path, None) if os.path.exists(path) else (os.path.dirname(path) or ".", os.path.basename(path))
        self.finish()
        if not has_checkpoint(folder, tag):
            raise CheckpointError(f"{path} is not a checkpoint of a Trainer with NeuronXLAStrategy")
        content = load_checkpoint(folder, tag, module.model, optimizer)
        if not isinstance(content, dict) or VERSION not in content:
            raise CheckpointError(f"{path} was not saved by a Trainer: load it with nxd_infer.load_checkpoint()")
        return content

    def remove(self, path: str) -> None:
        """Remove a checkpoint, after the save that is being written: until then it may be the only complete one."""
        self._unwanted.append(path)
        if not self.async_save:
            self.finish()

    def finish(self) -> None:
        """Wait for an asynchronous save, then remove what is not wanted any more. Raises the save's CheckpointError."""
        wait_for_save()
        while self._unwanted:
            folder, tag = os.path.split(self._unwanted.pop())
            folders.remove(storage_of(folder or "."), tag)


def _storable(values: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters without functions and others that only a pickle could store."""
    found = {}
    for name, value in values.items():
        try:
            pack(value, what=name)
        except CheckpointError:
            log.info("the checkpoint leaves out the hyperparameter %s, which cannot be stored", name)
        else:
            found[name] = value
    return found


def begin_next_epoch(fit_loop: dict[str, Any]) -> None:
    """Change the state of Lightning's loop, if it was saved at an epoch's end, to that of the next one's beginning.

    Resumed there with ``max_steps``, Lightning (2.5 and 2.6) would add a batch to the epoch that has ended.
    """
    epochs, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    if epochs["current"]["processed"] == epochs["current"]["ready"]:
        for counts in (epochs["current"], epochs["total"]):
            counts["completed"] = counts["processed"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
