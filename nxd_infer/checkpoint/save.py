"""What one rank saves, and writing it: now, or in a thread from copies of its own.

A rank writes safetensors, then one JSON with the runs of each tensor. Rank 0 sees by those JSONs that all have written,
so finishing an asynchronous save needs no communication that could meet the training's.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import random
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nxd_infer.checkpoint.storage import Storage
from nxd_infer.context import AXES, ParallelContext
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import ParamLayout, owned_blocks, weight_layout
from nxd_infer.layout.describe import describe_plans
from nxd_infer.layout.files.files import replacing, require_sliceable, sha256_of
from nxd_infer.layout.files.values import pack, pack_named
from nxd_infer.layout.shard import named_tensors
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.modules.lora.peft import SUBFOLDER, write_adapter
from nxd_infer.modules.nxd_model import NxDModel
from nxd_infer.optimizer.parallel import NxDOptimizer
from nxd_infer.optimizer.sharded_files import describe, stem
from nxd_infer.parallel_layers.random import get_xla_rng_tracker
from nxd_infer.util.devices import ACCELERATOR, accelerator_state, has_accelerator, set_accelerator_state

SILENCE = 600.0
"""Seconds without a new or longer file after which rank 0 gives an asynchronous save up: another rank is gone."""
SIGN_EVERY = 30.0
"""Seconds between two signs of a rank whose save goes on, where what it does shows in no file."""


@dataclass
class Content:
    """What one rank saves: tensors by file name, and the record that says what they are made of."""

    files: dict[str, dict[str, Tensor]]
    record: dict[str, Any]
    adapter: tuple[dict[str, Tensor], dict[str, Any]] | None = None
    """Of a model with LoRA, for rank 0: the tensors and the configuration of its adapter, for PEFT."""


def collect(
    context: ParallelContext,
    model: nn.Module | Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | Mapping[str, Any] | None,
    zero1_optimizer: bool,
    values: Mapping[str, Any],
    own_values: Mapping[str, Any],
    copy: bool,
) -> Content:
    """This rank's part. ``own_values`` are what every rank saves, ``values`` what rank 0 adds to them.

    ``copy`` makes it independent of later training steps.

    Raises CheckpointError for values that JSON and safetensors cannot hold, with the path to them.
    """
    files: dict[str, dict[str, Tensor]] = {}
    record: dict[str, Any] = {"place": {axis: context.axis(axis).rank for axis in AXES}}
    first = context.dp.rank == 0 and context.cp.rank == 0
    if model is not None and first:
        name = f"model.tp_rank_{context.tp.rank:02d}.pp_rank_{context.pp.rank:02d}.safetensors"
        if isinstance(model, nn.Module):
            files[name], described = _describe_model(local_module(model), context)
        else:
            files[name], described = _packed(*pack(model, what="model"))
        record["model"] = {"file": name, **described}
    sharded = optimizer.zero1 if isinstance(optimizer, NxDOptimizer) else zero1_optimizer
    if optimizer is not None and (first or (sharded and context.cp.rank == 0)):
        name = f"{stem(context)}.safetensors"
        if isinstance(optimizer, NxDOptimizer):
            files[name], described = describe(optimizer)
        else:
            state = optimizer.state_dict() if isinstance(optimizer, torch.optim.Optimizer) else optimizer
            files[name], described = _packed(*pack(state, what="optimizer"))
        record["optimizer"] = {"file": name, **described}
    extra = modules_with_extra_state(local_module(model)) if isinstance(model, nn.Module) else {}
    if extra:
        own_values = {**own_values, EXTRA: {name: module.get_extra_state() for name, module in extra.items()}}
    name = f"{rank_stem(context.rank)}.safetensors"
    own_values = {**own_values, "random": random_state(), **(values if context.rank == 0 else {})}
    files[name], described = _packed(*pack_named(own_values))
    record["values"] = {"file": name, **described}
    return Content({name: _storable(tensors, copy) for name, tensors in files.items()}, record)


EXTRA = "extra_state"


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have more of a state than tensors, by name."""
    default = nn.Module.get_extra_state
    return {name: one for name, one in model.named_modules() if type(one).get_extra_state is not default}


def rank_stem(rank: int) -> str:
    return f"rank_{rank:05d}"


def local_module(model: nn.Module) -> nn.Module:
    """The module itself, whose names are those of the checkpoint."""
    return model.local_module() if isinstance(model, NxDModel) else model


def _describe_model(model: nn.Module, context: ParallelContext) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parameters and buffers of which this rank is the first to hold some element, and their runs."""
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, Any] = {}
    degree, rank = context.tp.degree, context.tp.rank
    for name, (tensor, layout) in _weights(model).items():
        if layout.alias_of or not (owned_blocks(layout, degree, rank) or (rank == 0 and not tensor.numel())):
            continue
        tensors[name] = tensor.detach()
        pieces[name] = {
            "range": [0, tensor.numel()],
            "shape": list(tensor.shape),
            "layout": layout.rank_layout(degree, rank).to_json(),
            "logical": {logical: list(shape) for logical, shape in layout.logical_shapes.items()},
            "plans": describe_plans(layout),
        }
    return tensors, {"pieces": pieces}


def _weights(model: nn.Module) -> dict[str, tuple[Tensor, ParamLayout]]:
    """What is saved of a model: of one with LoRA what its configuration says, else everything."""
    if isinstance(model, LoRAModel):
        return model.saved_weights()
    here = named_tensors(model)
    return {name: (here[name], layout) for name, layout in weight_layout(model).items()}


def _packed(structure: Any, tensors: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}, {"structure": structure}


def _storable(tensors: Mapping[str, Tensor], copy: bool) -> dict[str, Tensor]:
    """On the CPU, dense, no two of them in one memory, and with ``copy`` in no memory of the caller's."""
    out: dict[str, Tensor] = {}
    used: set[int] = set()
    for name, tensor in tensors.items():
        require_sliceable(tensor.dtype, repr(name))
        stored = tensor.detach().cpu().contiguous()
        memory = stored.untyped_storage()
        mine = tensor.untyped_storage().data_ptr() != memory.data_ptr()
        if memory.data_ptr() in used or memory.nbytes() != stored.nbytes or (copy and not mine):
            stored = stored.clone()
        used.add(stored.untyped_storage().data_ptr())
        out[name] = stored
    return out


# --- random state -----------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The state of the generators of this process: PyTorch's, the tensor-parallel streams, Python's, numpy's."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "streams": get_xla_rng_tracker().get_states(),
        "python": random.getstate(),
    }
    if (accelerator := accelerator_state()) is not None:
        state[ACCELERATOR] = accelerator
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def restore_random_state(state: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError for what :func:`random_state` has not given; ``where`` it was."""
    try:
        torch.set_rng_state(state["torch"])
        get_xla_rng_tracker().set_states(state["streams"])
        random.setstate(state["python"])
        if ACCELERATOR in state and has_accelerator():
            set_accelerator_state(state[ACCELERATOR])
        numpy = sys.modules.get("numpy")
        if "numpy" in state and numpy is not None:
            numpy.random.set_state(state["numpy"])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the random state in {where} is damaged: {error!r:.200}; load another tag") from error


# --- writing ----------------------------------------------------------------------------------------------


def write_rank(storage: Storage, folder: str, rank: int, content: Content) -> None:
    """Write this rank's files; last its JSON, which holds their checksums."""
    last, sign = f"{rank_stem(rank)}.json", SignOfLife(storage, f"{folder}/{rank_stem(rank)}.alive")
    with storage.writing(folder, last, sign) as place:
        readers = stat.S_IMODE(place.stat().st_mode) & 0o666  # safetensors writes files that only their owner can read
        for name, tensors in content.files.items():
            with replacing(place / name) as temporary:
                save_file(tensors, temporary)
                temporary.chmod(readers)
            sign(0)
        written = {name: place / name for name in content.files}
        if content.adapter is not None and rank == 0:
            inside = content.adapter[1].get("save_lora_config_adapter", False)
            write_adapter(place / SUBFOLDER, *content.adapter, apart=not inside)
            adapter = [path for path in (place / SUBFOLDER).iterdir() if path.is_file()]
            written |= {path.relative_to(place).as_posix(): path for path in adapter}
        # What was just written is still in memory, and every rank reads its own.
        sha256 = {name: sha256_of(path, sign) for name, path in written.items()}
        sign.end()
        with replacing(place / last) as temporary:
            temporary.write_text(json.dumps({**content.record, "sha256": sha256}), encoding="utf-8")


class SignOfLife:
    """A small file that grows while a rank reads or uploads large ones. It is gone before the rank's JSON is there."""

    def __init__(self, storage: Storage, name: str):
        self._storage, self._name = storage, name
        self._signs, self._last, self._there = 0, time.monotonic(), False

    def __call__(self, count: int, /) -> None:
        if time.monotonic() - self._last < SIGN_EVERY:
            return
        self._signs += 1
        with contextlib.suppress(OSError, CheckpointError):  # rank 0 may have given up and removed the folder
            self._storage.write(self._name, b"." * self._signs)
        self._last, self._there = time.monotonic(), True

    def end(self) -> None:
        if self._there:
            with contextlib.suppress(OSError, CheckpointError):  # it may stay where nothing can be deleted
                self._storage.delete(self._name)
            self._there = False


def checksums(storage: Storage, folder: str, world_size: int) -> dict[str, str]:
    """The checksums of every file that the ranks have written, their JSONs included."""
    found: dict[str, str] = {}
    for rank in range(world_size):
        name = f"{rank_stem(rank)}.json"
        text = storage.read(f"{folder}/{name}")
        found |= json.loads(text)["sha256"] | {name: hashlib.sha256(text).hexdigest()}
    return found


def wait_for_ranks(storage: Storage, folder: str, world_size: int) -> None:
    """Wait until every rank has written. Raises CheckpointError when one has failed or nothing happens any more."""
    wanted = {f"{rank_stem(rank)}.json" for rank in range(world_size)}
    there: dict[str, int] = {}
    last = time.monotonic()
    while True:
        names = storage.files(folder)
        if wanted <= names.keys():
            return
        failed = sorted(name for name in names if name.endswith(".failed"))
        if failed:
            reason = storage.read(f"{folder}/{failed[0]}").decode(errors="replace")
            raise CheckpointError(f"{storage.where(folder)}/{failed[0]}: {reason}")
        if names != there:
            there, last = names, time.monotonic()
        elif time.monotonic() - last > SILENCE:
            raise CheckpointError(
                f"{storage.where(folder)}: nothing came for {SILENCE:.0f} s; missing: "
                f"{sorted(wanted - names.keys())[:8]}"
            )
        time.sleep(0.01 if storage.local else 1.0)


class Outstanding:
    """The one save of this process that goes on beside the training. The interpreter waits for it at its end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, storage: Storage, folder: str, rank: int, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                action()
            except Exception as error:  # raised by wait()
                self._error = error
                with contextlib.suppress(OSError, CheckpointError):  # rank 0 may have given up and removed the folder
                    storage.write(f"{folder}/{rank_stem(rank)}.failed", f"{error}".encode())

        self.wait()
        self._thread = threading.Thread(target=run, name="nxd-async-save", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Until it is written. Raises what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the last asynchronous save failed: {error}") from error

    def report(self) -> None:
        """At the end of the process: nobody has been told of the failure, so the process must not look like a success.

        An exception here would be printed and leave the exit status 0. What was registered after this module was
        imported has run; the output and the log are brought out before.
        """
        if self._error is None:
            return
        print(f"nxd_infer: the last asynchronous save failed: {self._error}", file=sys.stderr)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


outstanding = Outstanding()
atexit.register(outstanding.report)
