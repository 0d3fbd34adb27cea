"""``parallel_layers.save`` and ``load``: one folder per model-parallel rank.

::

    save_dir/tp_rank_00_pp_rank_00/checkpoint.safetensors        # save(...)
    save_dir/tp_rank_00_pp_rank_00                               # save(..., save_xser=True): JSON
    save_dir/tp_rank_00_pp_rank_00.tensors/tensor_0.<id>.safetensors

Source: API guide, "Checkpointing". The folders are the documented ones, the contents are safetensors and JSON.
Checkpoints of the reference (``checkpoint.pt``; a pickle beside ``tensor_0.pt``) are read with ``weights_only=True``.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.comm.launched import require_no_lonely_rank
from nxd_infer.comm.turns import in_turns, largest
from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import DictSource, RemappedSource, SafetensorsSource, WeightSource, load_weights, weight_layout
from nxd_infer.layout.files.one_rank import CHECKPOINT, read_facts, read_rank, write_many_files, write_one_file
from nxd_infer.layout.files.pickles import read_pickle
from nxd_infer.layout.files.values import pack
from nxd_infer.layout.sources import SelectedSource


def save(
    state_dict: Mapping[str, Any],
    save_dir: str | os.PathLike[str],
    save_serially: bool = True,
    save_xser: bool = False,
    down_cast_bf16: bool = False,
    *,
    master_dp_only: bool = True,
) -> None:
    """Save this rank's ``state_dict`` in ``save_dir``. Every rank calls this; those of data-parallel rank 0 write.

    Args:
        state_dict: plain values, such as ``{"model": model.state_dict(), "step": 3}``: tensors, NumPy arrays, numbers,
            text, bytes, and dictionaries, lists, tuples and sets of them. See :mod:`~nxd_infer.layout.files.values`.
        save_serially: one model-parallel rank writes at a time.
        save_xser: one file per tensor, written one by one: less memory.
        down_cast_bf16: store floating-point tensors as bfloat16; ``state_dict`` itself is not modified.
        master_dp_only: must be True: the other data-parallel ranks hold the same.

    A rank's part is replaced atomically: an interrupted save leaves the old one, and :func:`load` rejects parts of two
    different saves. Returns when all ranks are done. Raises CheckpointError if a value cannot be stored, with the path
    to it (``state_dict['a'][3]``), or if a file cannot be written, and on all other ranks if one fails. Raises
    NotInitializedError in one of several processes before ``initialize_model_parallel()``, where all would write the
    same file.
    """
    if not master_dp_only:
        raise CheckpointError("master_dp_only=False: data-parallel ranks hold the same; save what differs by itself")
    require_no_lonely_rank("save")
    context = current_context()
    root = Path(save_dir)
    number = largest(context, secrets.randbits(62))  # of this save, so that parts of two saves are never mixed
    facts = {"degrees": {"tp": context.tp.degree, "pp": context.pp.degree}, "save": number}

    def write() -> None:
        structure, tensors = pack(dict(state_dict), down_cast_bf16)
        path = root / _rank_name(context)
        if path.is_dir() if save_xser else path.is_file():
            raise CheckpointError(
                f"{path} already exists, saved {'without save_xser' if save_xser else 'with save_xser=True'}; save to "
                "another directory, or remove it first (a directory holds one kind of checkpoint)"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            if save_xser:
                write_many_files(path, structure, tensors, facts)
            else:
                path.mkdir(exist_ok=True)
                write_one_file(path / CHECKPOINT, structure, tensors, facts)
        except OSError as error:
            raise CheckpointError(f"the checkpoint could not be written: {error}") from error

    if context.ep.degree > 1:
        raise CheckpointError(
            f"save() has no files for experts on {context.ep.degree} expert parallel ranks: use save_checkpoint()"
        )
    writes = context.dp.rank == 0 and context.cp.rank == 0
    at_a_time = 1 if save_serially else context.world_size
    in_turns(context, at_a_time, lambda: write() if writes else None, of_world=True)


def load(
    load_dir: str | os.PathLike[str],
    model_or_optimizer: nn.Module | torch.optim.Optimizer | None = None,
    model_key: str = "model",
    load_xser: bool = False,
    sharded: bool = True,
    *,
    model: nn.Module | torch.optim.Optimizer | None = None,
    strict: bool = True,
    master_dp_only: bool = True,
    weights_only: bool = True,
) -> dict[str, Any]:
    """Load this rank's part of a checkpoint. Ranks need not call it at the same time.

    Args:
        load_dir: the ``save_dir`` of :func:`save`; with ``sharded=False`` a file, or a directory of safetensors.
        model_or_optimizer: loads ``checkpoint[model_key]``; also as ``model=``.
        model_key: key of the model in the checkpoint.
        load_xser: accepted without effect; files show how they were saved.
        sharded: False for one unsharded checkpoint with the logical names and shapes of the model: safetensors, or a
            file of ``torch.save``. Each rank reads only its part. This requires a module.
        strict: missing and unexpected names are an error, as in ``Module.load_state_dict``.
        master_dp_only, weights_only: accepted: the first data-parallel rank has saved, and code is never run.

    Returns the checkpoint, without ``model_key`` if a model or optimizer was passed.
    Raises CheckpointError if files are missing, damaged, of another degree, or contain code (which is never run), and
    WeightMismatchError if an unsharded checkpoint does not belong to the model.
    """
    if model is not None and model_or_optimizer is not None and model is not model_or_optimizer:
        raise CheckpointError("load() takes either model_or_optimizer or model, which mean the same; pass one of them")
    target = model if model is not None else model_or_optimizer
    if not sharded:
        return _load_unsharded(Path(load_dir), target, model_key, strict)
    checkpoint = _read_rank(Path(load_dir), current_context())
    if target is None:
        return checkpoint
    if model_key not in checkpoint:
        raise CheckpointError(
            f"{load_dir} has no {model_key!r}; it has {', '.join(map(repr, checkpoint)) or 'nothing'}. Pass model_key="
        )
    options = {"strict": strict} if isinstance(target, nn.Module) else {}
    try:
        target.load_state_dict(checkpoint.pop(model_key), **options)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{load_dir} does not fit the {type(target).__name__}: {error}") from error
    return checkpoint


def _read_rank(root: Path, context: ParallelContext) -> dict[str, Any]:
    path = root / _rank_name(context)
    if not path.exists():
        raise CheckpointError(f"{root} has no {path.name}; {_what_is_there(root)}")
    value, facts = read_rank(path)
    _require_same_save(root, path, facts, context)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a dictionary")
    return value


def _require_same_save(root: Path, path: Path, facts: Mapping[str, Any], context: ParallelContext) -> None:
    """Raise CheckpointError for a checkpoint of another degree, or with parts of different saves."""
    degrees = facts.get("degrees") or {}
    if not isinstance(degrees, dict) or not degrees.keys() <= {"tp", "pp"}:
        raise CheckpointError(f"{path} is damaged: it claims the degrees {degrees!r}")
    for axis, saved in degrees.items():
        if saved != context.axis(axis).degree:
            raise CheckpointError(
                f"{root} was saved by {saved} {axis} ranks and is being loaded by {context.axis(axis).degree}; "
                "load it at the same degree, or save one unsharded checkpoint and load it with sharded=False"
            )
    for tp, pp in itertools.product(range(degrees.get("tp", 0)), range(degrees.get("pp", 0))):
        other = root / f"tp_rank_{tp:02d}_pp_rank_{pp:02d}"
        if other == path or not other.exists():  # other hosts may keep their own parts
            continue
        if read_facts(other).get("save") != facts.get("save"):
            raise CheckpointError(
                f"{path.name} and {other.name} in {root} are parts of two different saves, one of which was "
                "interrupted; save again, or restore an older checkpoint"
            )


def _load_unsharded(path: Path, target: Any, model_key: str, strict: bool) -> dict[str, Any]:
    if not isinstance(target, nn.Module):
        raise CheckpointError("load(sharded=False) copies into a model: pass model=")
    rest: dict[str, Any] = {}
    source: WeightSource
    if path.is_dir() or path.suffix == ".safetensors":
        source = SafetensorsSource(path)
    else:
        if not path.is_file():
            raise CheckpointError(f"{path} is neither a file nor a directory of safetensors")
        value = read_pickle(path)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{path} holds a {type(value).__name__}, not a state dict")
        inner = value.get(model_key)
        if isinstance(inner, Mapping):
            rest = {key: item for key, item in value.items() if key != model_key}
            value = inner
        source = DictSource({name: item for name, item in value.items() if isinstance(item, Tensor)})
    tp = current_context().tp
    elsewhere = getattr(getattr(target, "stage", None), "elsewhere", None)
    if callable(elsewhere):  # a pipelined model's, whose class is in a package above this one
        others: set[str] = elsewhere(source.keys())  # pyright: ignore[reportAssignmentType]
        source = SelectedSource(source, lambda name: name not in others)
    load_weights(target, _with_fused_split(target, source), rank=tp.rank, degree=tp.degree, strict=strict)
    return rest


def _with_fused_split(model: nn.Module, source: WeightSource) -> WeightSource:
    """Return ``source`` with fused parameters split into their logical tensors, if it has fused, unsharded ones.

    In an unsharded model the parts of ``weight_qkv`` follow one another.
    """
    names = {name: name for name in source.keys()}  # noqa: SIM118 (a source is not a mapping)
    table: dict[str, str | tuple[str, int, int, int]] = dict(names)
    for name, layout in weight_layout(model).items():
        if name not in names or all(logical in names for logical in layout.logical_names):
            continue
        dim = next((i for i, plan in enumerate(layout.axes) if list(plan.parts) != [""]), None)
        if dim is None:
            continue
        at, logical = 0, dict(layout.sources)
        for part, size in layout.axes[dim].parts.items():
            table[logical[part]] = (name, dim, at, at + size)
            at += size
        del table[name]
    return source if len(table) == len(names) else RemappedSource(source, table)


def _rank_name(context: ParallelContext) -> str:
    return f"tp_rank_{context.tp.rank:02d}_pp_rank_{context.pp.rank:02d}"


def _what_is_there(root: Path) -> str:
    if not root.is_dir():
        return "it is not a directory"
    names = sorted(p.name for p in root.iterdir() if p.name.startswith("tp_rank_") and not p.name.endswith(".tensors"))
    if not names:
        return "it has no checkpoint of any rank"
    return f"it holds {', '.join(names[:16])}: the degrees of saving and loading must be the same"
