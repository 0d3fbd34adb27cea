"""A sharded optimizer's state in files: one safetensors file per rank, and JSON that describes it.

``optim.dp_rank_00.tp_rank_00.pp_rank_00.safetensors`` has for each piece of a parameter the tensors of its state as
``NAME|KEY`` (``exp_avg``, ``step``, ...) and its float32 master weight as ``NAME|master``. The JSON describes each
piece logically: the flat range ``[start, stop)`` of the rank's parameter, that parameter's shape, and its layout, which
maps its elements to logical tensors. So a state can be read at any other degree.

All files of a save have its number, so that a load sees that a later save was killed before it had replaced all of
them.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nxd_infer.comm.turns import in_turns, largest
from nxd_infer.context import ParallelContext
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.describe import describe_piece
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.layout.files.one_rank import storable
from nxd_infer.layout.params import layout_by_name
from nxd_infer.optimizer.groups import NOT_HYPERPARAMETERS
from nxd_infer.parallel_layers.grads import is_expert_parallel
from nxd_infer.util.dtypes import dtype_name

if TYPE_CHECKING:
    from nxd_infer.optimizer.parallel import NxDOptimizer

FORMAT = "nxd-optimizer-shards 1.0"
MASTER = "master"
GROUPS, NAMES = "param_groups", "group_names"
"""Keys of a description: the hyperparameters of each group, and the names of its parameters."""
SAVE = "save"
"""Key of the number of a save."""
INTERRUPTED = "one that was interrupted: load another folder, or save again"
OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Keys that learning-rate schedulers add to groups."""


def stem(context: ParallelContext) -> str:
    """Return the name of a rank's files without suffix."""
    return _stem(dp=context.dp.rank, tp=context.tp.rank, pp=context.pp.rank)


def _stem(**ranks: int) -> str:
    return ".".join(["optim", *(f"{axis}_rank_{rank:02d}" for axis, rank in ranks.items())])


def save_sharded(optimizer: NxDOptimizer, output_dir: str | os.PathLike[str], at_a_time: int = 8) -> None:
    """Write this rank's two files. Raises an error on every rank if one of them cannot."""
    optimizer.require_inited("its state is saved or loaded")
    folder = Path(output_dir)
    number = str(largest(optimizer.context, secrets.randbits(62)))

    def write() -> None:
        tensors, description = describe(optimizer)
        description[SAVE] = number
        path = folder / stem(optimizer.context)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path.with_name(f"{path.name}.safetensors")) as temporary:
                save_file(storable(tensors), str(temporary), {SAVE: number})
            # Write the description last and atomically: without it a shard counts as missing.
            with replacing(path.with_name(f"{path.name}.json")) as temporary:
                temporary.write_text(json.dumps(description, indent=1))
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error

    in_turns(optimizer.context, at_a_time, write)


def describe(optimizer: NxDOptimizer, experts_only: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of this rank's state by their names in the file (not copied), and the JSON for them.

    ``experts_only``: of the parameters whose experts are split over expert parallel ranks.

    Raises ParallelConfigError for parameter groups that were changed, CheckpointError for what JSON cannot hold.
    """
    optimizer.require_inited("its state is saved or loaded")
    optimizer.hand_on_hyperparameters()  # raises if the groups that are described below have other parameters
    context = optimizer.context
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, Any] = {}
    for piece in optimizer.pieces:
        if experts_only and not is_expert_parallel(piece.param):
            continue
        piece.refresh()  # weights may have been loaded since the last step
        name = optimizer.names[piece.index]
        scalars: dict[str, Any] = {}
        for key, value in optimizer.optimizer.state.get(piece.tensor, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}|{key}"] = value.detach()
            else:
                scalars[key] = _stored(value, f"state {key!r} of {name!r}")
        if piece.own_memory:
            tensors[f"{name}|{MASTER}"] = piece.tensor.detach()
        layout = layout_by_name(piece.param, name)
        described = describe_piece(
            layout, context.tp.degree, context.tp.rank, piece.param.shape, piece.start, piece.stop
        )
        pieces[name] = {**described, "values": scalars, "dtype": dtype_name(piece.tensor.dtype)}
    groups = [
        {
            key: _stored(value, f"param_groups[{number}][{key!r}]")
            for key, value in group.items()
            if key not in NOT_HYPERPARAMETERS
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    degrees = {axis: context.axis(axis).degree for axis in ("dp", "tp", "pp")}
    return tensors, {
        "format": FORMAT,
        "degrees": degrees,
        "param_groups": groups,
        NAMES: optimizer.group_names,
        "pieces": pieces,
    }


def _stored(value: Any, where: str) -> Any:
    """Return a hyperparameter as JSON: plain, or a tensor (such as a learning rate) with its dtype; floats are exact.

    Raises CheckpointError for anything else, because a resumed job would otherwise silently use another value.
    """
    if isinstance(value, Tensor):
        return {"tensor": dtype_name(value.dtype), "values": value.detach().cpu().tolist()}
    if isinstance(value, tuple | list):
        return [_stored(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, bool | int | float | str | None):
        return value
    raise CheckpointError(
        f"the optimizer's {where} is a {type(value).__name__}, which a checkpoint cannot store: it takes numbers, "
        "text, None, tensors, and lists of them"
    )


def _restored(value: Any) -> Any:
    """Invert :func:`_stored`, with lists as tuples. Raises CheckpointError for anything else."""
    if isinstance(value, list | tuple):
        return tuple(_restored(item) for item in value)
    if not isinstance(value, dict):
        return value
    try:
        dtype = getattr(torch, value["tensor"])
        return torch.tensor(value["values"], dtype=dtype)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"a hyperparameter of the optimizer is damaged: {value!r:.80} ({error!r:.80})") from error


def load_sharded(optimizer: NxDOptimizer, output_dir: str | os.PathLike[str], at_a_time: int = 8) -> None:
    state = in_turns(optimizer.context, at_a_time, lambda: _read(optimizer, Path(output_dir)))
    in_turns(optimizer.context, at_a_time, lambda: take_over(optimizer, *state))  # all, or none


def _read(optimizer: NxDOptimizer, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the description of this rank's files, checked; see :func:`load_sharded`."""
    path = folder / stem(optimizer.context)
    tensors_file, json_file = (path.with_name(path.name + ending) for ending in (".safetensors", ".json"))
    for file in (tensors_file, json_file):
        if not file.is_file():
            there = sorted(p.name for p in folder.glob("optim.*.safetensors")) if folder.is_dir() else []
            raise CheckpointError(f"{file} is missing; {folder} has {len(there)} optimizer shards: {there[:8]}")
    description = _described(json_file)
    _, own = describe(optimizer)
    if description["degrees"] != own["degrees"]:
        raise CheckpointError(
            f"{folder} was saved at {_degrees(description['degrees'])}, but this job runs at "
            f"{_degrees(own['degrees'])}; load it with nxd_infer.load_checkpoint(), which reads any degrees, or run at "
            "the same ones"
        )
    require_same_groups(optimizer, description, str(json_file), optimizer.group_names)
    stored, expected = _ranges(description), _ranges(own)
    if differing := [name for name in stored | expected if stored.get(name) != expected.get(name)]:
        raise CheckpointError(
            f"{json_file} belongs to another model: {len(differing)} parameters differ in name, shape or range, "
            f"among them {differing[:4]}"
        )
    try:
        with safe_open(str(tensors_file), framework="pt") as file:
            of_save = (file.metadata() or {}).get(SAVE)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{tensors_file} cannot be read: {error}") from error
    if of_save != description.get(SAVE):
        raise CheckpointError(f"{json_file} is of another save than {tensors_file.name}, {INTERRUPTED}")
    _require_same_save(optimizer.context, folder, description.get(SAVE))
    return tensors, description


def _described(file: Path) -> dict[str, Any]:
    try:
        description = json.loads(file.read_text())
        _ranges(description)
        stored_format = description["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} does not describe an optimizer shard: {error!r}") from error
    if stored_format != FORMAT:
        raise CheckpointError(f"{file} has the format {stored_format!r}; this version reads {FORMAT!r}")
    return description


def _ranges(description: dict[str, Any]) -> dict[str, Any]:
    return {name: (piece["range"], piece["shape"]) for name, piece in description["pieces"].items()}


def _require_same_save(context: ParallelContext, folder: Path, number: str | None) -> None:
    """Raise CheckpointError if the next rank of an axis has files of another save; so all ranks have looked at all."""
    ranks = {axis: context.axis(axis).rank for axis in ("dp", "tp", "pp")}
    for axis in ranks:
        file = folder / f"{_stem(**ranks | {axis: (ranks[axis] + 1) % context.axis(axis).degree})}.json"
        # On a machine without a folder in common it is not there.
        if file.is_file() and _described(file).get(SAVE) != number:
            raise CheckpointError(f"{file} is of another save than {stem(context)}.json, {INTERRUPTED}")


def require_same_groups(
    optimizer: NxDOptimizer, description: dict[str, Any], where: str, names: list[list[str]]
) -> None:
    """Raise CheckpointError if the groups, matched by position, are of another optimizer or of other parameters.

    ``names``: of the optimizer's parameters, by group, that ``description`` is about.
    """
    stored, groups = description["param_groups"], optimizer.param_groups
    if len(stored) != len(groups):
        raise CheckpointError(
            f"{where} has {len(stored)} parameter groups, this optimizer {len(groups)}; create it with the same groups"
        )
    if NAMES not in description:  # from the reference
        return
    for saved, own in zip(stored, groups, strict=True):
        missing = sorted(optimizer.optimizer.defaults.keys() - saved.keys())
        surplus = sorted(saved.keys() - own.keys() - set(OF_SCHEDULES))
        if missing and surplus:  # another PyTorch release may have more or fewer of them, but not both
            raise CheckpointError(
                f"{where} is of another optimizer than this {type(optimizer.optimizer).__name__}: it has {surplus} and "
                f"not {missing}; create an optimizer of the saved class, or load without one"
            )
    for number, (saved, own) in enumerate(zip(description[NAMES], names, strict=False)):
        differing = sorted(set(saved) ^ set(own))
        if differing:
            raise CheckpointError(
                f"{where}: parameter group {number} has other parameters than this optimizer's: {differing[:4]}; "
                "pass the groups in the order of the save"
            )


def take_over(optimizer: NxDOptimizer, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Load into ``optimizer`` the state in the form of :func:`describe`; missing master weights are left unchanged."""
    by_name: dict[str, dict[str, Any]] = {
        name: {key: _restored(value) for key, value in piece["values"].items()}
        for name, piece in description["pieces"].items()
    }
    masters: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("|")
        if key == MASTER:
            masters[name] = tensor
        else:
            by_name[name][key] = tensor
    state = optimizer.state_dict()
    stepped = [tensor for group in optimizer.optimizer.param_groups for tensor in group["params"]]
    index_of = {id(tensor): i for i, tensor in enumerate(stepped)}
    state["state"] = {
        index_of[id(piece.tensor)]: by_name[optimizer.names[piece.index]]
        for piece in optimizer.pieces
        if by_name[optimizer.names[piece.index]]
    }
    for group, stored in zip(state["param_groups"], description["param_groups"], strict=True):
        group.update({key: value if isinstance(value, Tensor) else _restored(value) for key, value in stored.items()})
    for entry in state.get("pieces", ()):
        if entry["master"] is not None:
            entry["master"] = masters.get(entry["name"])
    optimizer.load_state_dict(state)
    for piece in optimizer.pieces:  # PyTorch has converted all state to the dtype of the weights
        name, own = optimizer.names[piece.index], optimizer.optimizer.state.get(piece.tensor, {})
        if description["pieces"][name].get("dtype") != dtype_name(piece.tensor.dtype):
            continue
        for key, value in by_name[name].items():
            here = own.get(key)
            if isinstance(value, Tensor) and isinstance(here, Tensor) and here.dtype != value.dtype:
                own[key] = value.to(here.device)


def _degrees(degrees: dict[str, int]) -> str:
    return ", ".join(f"{axis} {degree}" for axis, degree in degrees.items())
