"""Open a stored checkpoint outside of a job: ours or the reference's, with the layouts of all its tensors.

What works on stored checkpoints (:mod:`.reshard`, :mod:`.export`, :mod:`.compare`) starts here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from nxd_infer.checkpoint.archive import opened_whole
from nxd_infer.checkpoint.folder import holds_checkpoint
from nxd_infer.checkpoint.neuronx.archive import AnyArchive, ReferenceArchive, one_by_one
from nxd_infer.checkpoint.neuronx.folder import reference_in
from nxd_infer.checkpoint.neuronx.layouts import infer_layouts, read_rules
from nxd_infer.checkpoint.neuronx.optimum import layouts_of, metadata_files
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.errors import ModelConfigError
from nxd_infer.layout import ParamLayout, weight_layout

PathLike = str | os.PathLike[str]
FAMILIES = "nxd_models.registry"
"""The registry of model families, which is above this package: it is found by its name."""


def open_archive(
    path: PathLike,
    tag: str | None = None,
    kinds: Iterable[str] = ("model", "optimizer", "values"),
    config: PathLike | None = None,
    rules: PathLike | None = None,
) -> AnyArchive:
    """Open a checkpoint, whose files of ``kinds`` are verified by their checksums before use.

    Args:
        path: a folder of ``save_checkpoint``, one checkpoint in it, or a folder that the reference wrote.
        tag: which checkpoint. Default: the newest complete one.
        kinds: ``"model"``, ``"optimizer"`` and ``"values"`` (all that are not tensors of one of these).
        config, rules: for the reference's files, which do not say how a tensor was sharded: the directory of the
            model, with its ``config.json``; a JSON file of sharded dimensions, such as ``{"*.o_proj.weight": 1}``.
            Without both, a ``config.json`` in or beside the checkpoint is used.

    Raises CheckpointError if there is no such checkpoint, a file is damaged (by name), or layouts are unknown.
    """
    reference = open_if_reference(path, tag)
    if reference is None:
        return opened_whole(storage_of(path), tag, list(kinds))
    if tables := metadata_files(Path(reference.where)):
        reference.know(layouts_of(reference, tables))
        return reference
    known = _layouts(config) if config is not None else {} if rules is not None else _layouts_beside(reference)
    reference.know({**infer_layouts(reference, {} if rules is None else read_rules(Path(rules)), known), **known})
    return reference


def open_if_reference(path: PathLike, tag: str | None = None) -> ReferenceArchive | None:
    """Return the reference's checkpoint at ``path``, whose layouts are not known yet; None if it is ours."""
    storage = storage_of(path)
    folder = None if holds_checkpoint(storage, tag) else reference_in(storage, tag)
    return None if folder is None else ReferenceArchive(folder)


def _layouts(config: PathLike) -> dict[str, ParamLayout]:
    """Return the layouts of the parameters of a Hugging Face directory's model, under each of their names."""
    layouts = weight_layout(build_on_meta(config))
    return {**one_by_one(layouts), **layouts}


def _layouts_beside(reference: ReferenceArchive) -> dict[str, ParamLayout]:
    """Return the layouts of the model whose configuration is in or beside the checkpoint's folder; {} without one."""
    folder = Path(reference.where)
    place = next((place for place in (folder, folder.parent) if (place / "config.json").is_file()), None)
    with contextlib.suppress(ModelConfigError):  # of a model that has no family
        return {} if place is None else _layouts(place)
    return {}


def build_on_meta(config: PathLike) -> nn.Module:
    """Return the module of a Hugging Face directory, without memory. Raises ModelConfigError if no family has it."""
    with torch.device("meta"):
        return importlib.import_module(FAMILIES).build(config)
