"""Read the reference's checkpoint folders; unpickles only tensors and plain values.

::

    ckpts/step_100/checkpoint, done, user_content.pt, scheduler.pt              save_checkpoint of its trainer
                   model/dp_rank_00_tp_rank_00_pp_rank_00.pt [and .pt.tensors/tensor_0.pt with use_xser]
                   optim/dp_rank_00_tp_rank_00_pp_rank_00.pt [...]              of every rank with ZeRO-1
    ckpts/tp_rank_00_pp_rank_00/checkpoint.pt                                   its parallel_layers.save
    ckpts/tp_rank_00_pp_rank_00 and tp_rank_00_pp_rank_00.tensors/tensor_0.pt   the same with save_xser
    pretrained_weight/model/dp_rank_00_tp_rank_00_pp_rank_00.pt                 its checkpoint converter: without marks
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from nxd_infer.checkpoint.storage import LocalStorage, Storage
from nxd_infer.errors import CheckpointError

MARK, DONE, TENSORS = "checkpoint", "done", ".tensors"
_RANK = re.compile(
    r"^(?:dp_rank_(\d{1,4})_)?(ep_rank_\d+_)?tp_rank_(\d{1,4})_pp_rank_(\d{1,4})(?:_dp_rank_(\d{1,4}))?(?:\.pt)?$"
)

Place = tuple[int, int, int]
"""Data-parallel, tensor-parallel and pipeline rank."""


def reference_in(storage: Storage, tag: str | None) -> Path | None:
    """Return the folder of the reference's checkpoint ``tag``; without a tag the newest complete one, or the root.

    Its checkpoints are read from folders of a file system only.
    """
    if not isinstance(storage, LocalStorage):
        return None
    root = storage.root
    if tag is not None:
        return root / tag if _is_whole(root / tag) else None
    if _is_whole(root):
        return root
    complete = [folder for folder in root.iterdir() if _is_whole(folder)] if root.is_dir() else []
    return max(complete, key=_saved_at, default=None)


def _saved_at(folder: Path) -> tuple[int, str]:
    done = folder / DONE
    return (done if done.exists() else folder).stat().st_mtime_ns, folder.name


def _is_whole(folder: Path) -> bool:
    if (folder / MARK).exists():
        return (folder / DONE).exists() and not (folder / "manifest.json").exists()
    ranks = itertools.chain(folder.glob("*tp_rank_*"), folder.glob("model/dp_rank_*"))
    return any(_RANK.match(path.name.removesuffix(TENSORS)) for path in ranks)


def files_of_ranks(folder: Path) -> dict[Place, Path]:
    """Return the file, or the folder, of each rank."""
    files: dict[Place, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _RANK.match(path.name.removesuffix(TENSORS))
        if match is None:
            continue
        if path.name.endswith(TENSORS):
            if not path.with_name(path.name.removesuffix(TENSORS)).is_file():
                raise CheckpointError(f"{path} lacks the file {path.name.removesuffix(TENSORS)} beside it; restore it")
            continue
        dp, ep, tp, pp, dp_last = match.groups()
        if ep:
            raise CheckpointError(f"{path}: checkpoints of expert parallelism cannot be read")
        place = int(dp or dp_last or 0), int(tp), int(pp)
        if place in files:
            raise CheckpointError(f"{files[place].name} and {path.name} of {folder} are of the same rank; keep one")
        files[place] = path
    return files
