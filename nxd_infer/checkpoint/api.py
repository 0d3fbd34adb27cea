"""Save and resume a training job.

Source: NxD Core training API, "Save Checkpoint" and "Load Checkpoint". The files are safetensors and JSON; nothing is
pickled. For the file layout see :mod:`nxd_infer.checkpoint.folder`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from nxd_infer.checkpoint import folder as folders
from nxd_infer.checkpoint.archive import TRIES, Archive
from nxd_infer.checkpoint.async_save import outstanding
from nxd_infer.checkpoint.contents import Content, collect
from nxd_infer.checkpoint.load import (
    DATA,
    extra_change,
    load_state,
    model_change,
    of_this_rank,
    optimizer_change,
    require_adapter,
    same_degrees,
)
from nxd_infer.checkpoint.neuronx.archive import AnyArchive, ReferenceArchive
from nxd_infer.checkpoint.neuronx.folder import reference_in
from nxd_infer.checkpoint.random_state import restore_random_state
from nxd_infer.checkpoint.save import wait_for_ranks, write_content
from nxd_infer.checkpoint.storage import LocalStorage, Storage, storage_of
from nxd_infer.comm.launched import require_no_lonely_rank
from nxd_infer.comm.turns import in_turns, largest
from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import CheckpointError
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.modules.lora.peft import collect_adapter, write_adapter
from nxd_infer.modules.nxd_model import local_module
from nxd_infer.util.also_called import also_called
from nxd_infer.util.options import whole_number

__all__ = ["has_checkpoint", "load_checkpoint", "save_checkpoint", "wait_for_save"]

WORKERS = range(1, 33)
ALL = -1
"""The reference's ``num_kept_ckpts`` that removes nothing."""
NOTHING, REFERENCE = 0, 1 << 62
"""Returned instead of a checkpoint's number. The maximum over all ranks is used, and only rank 0 looks."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


@also_called(
    neutral={"use_zero1_dcp": False, "avoid_saving_lower_precision_weights": False},
    renamed={"checkpoint_dir_str": "path"},
)
def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str = "",
    model: nn.Module | Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | Mapping[str, Any] | None = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    *,
    nxd_config: Mapping[str, Any] | None = None,
    dataloader: Any = None,
) -> None:
    """Save a training job under ``path/tag``, all or nothing. Every rank calls it with the same shared ``path``.

    If the job is killed at any moment, earlier checkpoints remain, and the new one is either complete or absent.

    Args:
        path: the folder of the job's checkpoints, or the URL of any store that fsspec supports, such as
            ``s3://bucket/prefix`` (with its package: ``pip install 'nxd-infer[s3]'``).
        tag: the checkpoint's name; an existing one of that name is replaced at the end.
        model: the model, or a dictionary, which can only be loaded at the same degrees. Data-parallel rank 0 writes.
        optimizer: the optimizer, or its state as a dictionary (only for the same degrees). With ZeRO-1 every rank
            writes its share, including float32 masters.
        scheduler: anything whose ``state_dict()`` holds values like ``user_content``.
        user_content: plain values: tensors, NumPy arrays, numbers, text, bytes, and dictionaries, lists, tuples and
            sets of them; rank 0's is saved. See :mod:`~nxd_infer.layout.files.values`.
        num_workers: ranks that write at the same time, 1 to 32.
        use_xser: all ranks write at the same time, whatever ``num_workers`` is.
        num_kept_ckpts: keep only this many newest checkpoints in ``path`` once this one is complete; None or -1: all.
        async_save: return once this rank's tensors are copied, and write in the background. One save at a time: the
            next one, :func:`load_checkpoint`, :func:`wait_for_save` and the end of the process wait for it, and raise
            its error.
        zero1_optimizer: whether a dictionary ``optimizer`` differs between data-parallel ranks.
        nxd_config: accepted and ignored; the model and the optimizer know it.
        dataloader: anything with a ``state_dict()`` that holds the position in the data, such as
            :class:`~nxd_infer.trainer.data.ResumableLoader`; every rank's is saved.

    The state of the random generators is saved too. Raises CheckpointError, on all ranks, for a value that only a
    pickle could store, with the path to it (``user_content['a'][3]``), or if a rank cannot write.
    """
    if not use_xser:
        _check_workers(num_workers)
    if num_kept_ckpts == ALL:
        num_kept_ckpts = None
    if num_kept_ckpts is not None:
        whole_number("num_kept_ckpts", num_kept_ckpts, CheckpointError, 1)
    tag = folders.checked_tag(tag)
    require_no_lonely_rank("save_checkpoint")
    context, storage = current_context(), storage_of(path)

    def prepare() -> Content:
        outstanding.wait()
        values = {"user_content": user_content}
        if scheduler is not None:
            values["scheduler"] = scheduler.state_dict()
        own_values = {} if dataloader is None else {"dataloader": dataloader.state_dict()}
        return collect(context, model, optimizer, zero1_optimizer, values, own_values, copy=async_save)

    content = _together(context, prepare)
    inner = local_module(model) if isinstance(model, nn.Module) else None
    if isinstance(inner, LoRAModel):
        tensors, config = collect_adapter(inner)  # a collective
        apart = not config.get("save_lora_config_adapter", False)
        if context.rank == 0:
            content.write_adapter = partial(write_adapter, tensors=tensors, config=config, apart=apart)
    counter = _number_of(context, _typed_errors(storage, lambda: folders.begin(storage, tag)))
    folder = folders.folder_of(storage, tag, counter)

    def write() -> None:
        write_content(storage, folder, context.rank, content)

    def finish() -> None:
        if context.rank == 0:
            checksums = wait_for_ranks(storage, folder, context.world_size)
            folders.finish(storage, tag, counter, context, checksums, num_kept_ckpts)

    def write_and_finish() -> None:
        try:
            write()
            finish()
        except Exception:
            if context.rank == 0:
                folders.abandon(storage, tag, counter)
            raise

    if async_save:
        outstanding.start(storage, folder, context.rank, _typed_errors(storage, write_and_finish))
        return
    try:
        in_turns(context, context.world_size if use_xser else num_workers, _typed_errors(storage, write), of_world=True)
        _together(context, _typed_errors(storage, finish))
    except Exception:
        if context.rank == 0:
            folders.abandon(storage, tag, counter)
        raise


@also_called(neutral={"use_zero1_dcp": False}, renamed={"checkpoint_dir_str": "path"})
def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    *,
    dataloader: Any = None,
    verify: bool = True,
) -> Any:
    """Load a checkpoint of :func:`save_checkpoint`, at the same or other degrees. Every rank calls it.

    Checkpoints of the reference can be read too: its ``path/tag`` with a file ``checkpoint`` in it, and the
    ``tp_rank_00_pp_rank_00`` of its ``parallel_layers.save``. See :mod:`nxd_infer.checkpoint.neuronx.folder`.

    Args:
        path, tag: where; without a tag the newest complete checkpoint. If there is none yet, nothing is loaded, so
            that a job's first start works like any other; a missing tag is an error.
        model, optimizer, scheduler: are loaded from the checkpoint, the optimizer after its model. With an optimizer
            the random generators are restored too, if the degrees are those of the saving job.
        num_workers: ranks that read at the same time, 1 to 32.
        strict: False keeps parameters that the checkpoint lacks, and ignores what only it holds.
        dataloader: anything with ``load_state_dict()``, called with the position in the data: that of the same rank at
            the degrees of the save; at others the one that all ranks had.
        verify: compare the files with their checksums before anything is changed. Each file is read once for this, by
            one rank, and is in memory when the ranks read their parts.

    Returns the user contents, or None. At equal degrees training continues bit for bit.

    Raises CheckpointError if there is no complete checkpoint of the tag, a file is missing or damaged (by name), or
    the checkpoint lacks what is requested; WeightMismatchError, listing names and shapes, if it belongs to another
    model.
    """
    _check_workers(num_workers)
    context, storage = current_context(), storage_of(path)
    tag = None if tag is None else str(tag)
    _together(context, outstanding.wait)
    targets = {"model": model, "optimizer": optimizer}
    kinds = ["values", *(kind for kind, target in targets.items() if target is not None)]

    def compare(archive: AnyArchive) -> tuple[Any, list[Callable[[], object]]]:
        changes: list[Callable[[], object]] = []
        values = archive.value(0, "values")
        if scheduler is not None and "scheduler" not in values:
            raise CheckpointError(f"{archive.where} holds no scheduler; it was saved without")
        if dataloader is not None:  # steps that may reject their state come first
            changes.append(
                partial(load_state, "position in the data", dataloader, of_this_rank(archive, context, DATA))
            )
        if scheduler is not None:
            changes.append(partial(load_state, "scheduler", scheduler, values["scheduler"]))
        if model is not None:
            changes.append(model_change(model, archive, strict, context))
            extra = extra_change(model, archive, strict, context)
            changes.extend([extra] if extra is not None else [])
        if optimizer is not None:
            changes.append(optimizer_change(optimizer, archive, context))
            if model is not None:
                require_adapter(model, archive)
        if optimizer is not None and same_degrees(archive, context):
            random_state = archive.value(context.rank, "values").get("random")
            if random_state is not None:
                changes.append(partial(restore_random_state, random_state, archive.where))
        archive.open(["model"] if model is not None else [])  # what is read only when it is changed
        return values["user_content"], changes

    def take_turns(action: Callable[[], T]) -> T:
        return in_turns(context, num_workers, _typed_errors(storage, action), of_world=True)

    def read(archive: AnyArchive) -> tuple[Any, list[Callable[[], object]]]:
        take_turns(lambda: archive.verify(kinds, context.rank, context.world_size))
        return take_turns(lambda: compare(archive))

    loaded = _read_whole(storage, tag, context, verify, read)
    if loaded is None:
        if context.rank == 0:
            logger.warning(
                "%s holds no checkpoint yet: nothing is loaded, the model keeps the weights that it has", path
            )
        return None
    # No rank changes anything unless all have checked what they read.
    user_content, changes = loaded
    take_turns(lambda: [change() for change in changes])
    return user_content


@also_called(renamed={"checkpoint_dir_str": "path"})
def has_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> bool:
    """Whether :func:`load_checkpoint` would find a checkpoint; True for a damaged one, which it then names."""
    storage, tag = storage_of(path), None if tag is None else str(tag)
    return folders.holds_checkpoint(storage, tag) or reference_in(storage, tag) is not None


def wait_for_save() -> None:
    """Wait until this rank's part of an asynchronous save is written, on rank 0 the whole save.

    Raises CheckpointError with the save's error.
    """
    outstanding.wait()


def _check_workers(num_workers: Any) -> None:
    whole_number("num_workers", num_workers, CheckpointError, WORKERS[0], WORKERS[-1])


def _typed_errors(storage: Storage, action: Callable[[], T]) -> Callable[[], T]:
    """Wrap ``action``, so that its failures to read and write are CheckpointErrors that name the folder."""

    def run() -> T:
        try:
            return action()
        except OSError as error:
            raise CheckpointError(f"{storage.where()} cannot be read or written: {error}") from error

    return run


def _together(context: ParallelContext, action: Callable[[], T]) -> T:
    """Run on all ranks at once; all wait, and all fail, together."""
    return in_turns(context, context.world_size, action, of_world=True)


def _number_of(context: ParallelContext, action: Callable[[], int]) -> int:
    """Return on every rank the number that ``action`` returns on rank 0."""
    return largest(context, _together(context, lambda: action() if context.rank == 0 else 0))


def _read_whole(
    storage: Storage, tag: str | None, context: ParallelContext, verify: bool, read: Callable[[AnyArchive], T]
) -> T | None:
    """Have every rank ``read`` one checkpoint, again if a save replaces it meanwhile; None if there is none."""
    archive: AnyArchive | None = None
    failure: Exception | None = None
    for _ in range(TRIES):
        counter = _number_of(context, _typed_errors(storage, lambda: _find(storage, tag)))
        if counter == NOTHING:
            return None
        archive = failure = result = None
        try:
            archive = _open(storage, counter, tag, context, verify)
            result = read(archive)
        except Exception as error:  # on all ranks
            failure = error
        # One that cannot be opened may have been renamed or replaced since it was found.
        if not largest(context, int(archive is None or archive.replaced())):
            if failure is not None:
                raise failure
            return result
    if archive is None and failure is not None:
        raise failure
    where = storage.where() if archive is None else archive.where
    raise CheckpointError(f"the checkpoint {where} {folders.WHILE_READ}")


def _find(storage: Storage, tag: str | None) -> int:
    """Return the number of the checkpoint to load, NOTHING, or REFERENCE for one of the reference."""
    if isinstance(storage, LocalStorage) and storage.root.is_file():
        raise CheckpointError(f"{storage.root} is a file; give the folder that save_checkpoint() was given")
    ours = folders.holds_checkpoint(storage, tag)
    if not ours and reference_in(storage, tag) is not None:
        return REFERENCE
    if tag is None and not ours:
        return NOTHING
    return folders.find_checkpoint(storage, tag).counter


def _open(storage: Storage, counter: int, tag: str | None, context: ParallelContext, verify: bool) -> AnyArchive:
    """Open on every rank the checkpoint that rank 0 found."""

    def find() -> AnyArchive:
        if counter == REFERENCE and (reference := reference_in(storage, tag)) is not None:
            return ReferenceArchive(reference)
        checkpoint = folders.numbered_checkpoint(storage, tag, counter)
        if checkpoint is None:
            raise CheckpointError(
                f"rank {context.rank} does not see the checkpoint number {counter} of {storage.where()} that rank 0 "
                "has found: the folder must be on a file system that all ranks share"
            )
        return Archive(checkpoint, verify)

    return _together(context, _typed_errors(storage, find))
