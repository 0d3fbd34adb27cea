"""The world of processes that a launcher has started, and its process group.

torchrun and similar launchers start one process per rank and set environment variables. If the program does not start a
process group itself, model parallelism does: otherwise every process would train its own model, and all of them would
write the same files.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from nxd_infer.context import LOCAL, current_context, default_context
from nxd_infer.errors import NotInitializedError, ParallelConfigError
from nxd_infer.util.devices import group_exists, has_accelerator

PLACE = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that ``torch.distributed`` needs besides ``WORLD_SIZE`` to find the other ranks."""


def launched_world() -> int:
    """Return how many processes the launcher has started, from ``WORLD_SIZE``; 1 without a launcher."""
    return _number("WORLD_SIZE", least=1) if "WORLD_SIZE" in os.environ else 1


def is_launched() -> bool:
    """Return whether a launcher has started this process for a group: as one of several, or alone with a GPU."""
    return launched_world() > 1 or ("WORLD_SIZE" in os.environ and not _missing() and has_accelerator())


def _missing() -> list[str]:
    return [name for name in PLACE if not os.environ.get(name)]


def _number(name: str, least: int = 0) -> int:
    text = os.environ[name]
    if not text.isdecimal() or int(text) < least:
        raise ParallelConfigError(
            f"{name} must be a whole number of at least {least}, got {text!r} in the environment: start the processes "
            "with torchrun, or correct it"
        )
    return int(text)


def join_launched_world(timeout: float) -> None:
    """Start the process group of a launched world without one: gloo on the CPU, NCCL with one GPU per rank.

    Does nothing if a group exists, or without a launcher. One process alone gets a group only to train on its GPU:
    models are where the group communicates. ``timeout``: seconds to wait for the other ranks, here and in
    collectives of the group. Raises NotInitializedError if the environment lacks their address or they do not come, and
    ParallelConfigError if the devices do not match the ranks.
    """
    if group_exists() or not is_launched():
        return
    world, missing = launched_world(), _missing()
    if missing:
        raise NotInitializedError(
            f"WORLD_SIZE={world} says that this process is one of {world}, but the environment has no "
            f"{', '.join(missing)}: start the processes with torchrun, call "
            "torch.distributed.init_process_group() yourself, or unset WORLD_SIZE to run in this process alone"
        )
    rank, port, (backend, device) = _number("RANK"), _number("MASTER_PORT"), _backend_of_the_devices()
    try:
        # One rank needs no port, which another process alone with the same variables may have.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        alone = {"store": store, "rank": 0, "world_size": 1} if world == 1 else {}
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout), device_id=device, **alone)
    except dist.DistError as error:
        raise NotInitializedError(
            f"rank {rank} did not meet the other ranks of {world} at {os.environ['MASTER_ADDR']}:{port} within "
            f"{timeout:g} s ({error}): start every rank, with the same MASTER_ADDR and MASTER_PORT, or pass a longer "
            "timeout to initialize_model_parallel()"
        ) from error


def refuse_configured_xla() -> None:
    """Raise NotInitializedError if torch_xla is set to other devices than the CPU: ranks would not train there."""
    device = os.environ.get("PJRT_DEVICE", "CPU")  # set by torch_xla on import
    if device != "CPU":
        raise NotInitializedError(
            f"PJRT_DEVICE={device}: training over XLA devices is not supported yet; set PJRT_DEVICE=CPU to train on "
            "the CPU, or call torch.distributed.init_process_group() yourself"
        )


def refuse_lonely_xla() -> None:
    """Raise NotInitializedError if torch_xla knows of fewer ranks than there are: each would train alone."""
    if not group_exists() or dist.get_backend() != "xla":
        return
    import torch_xla.runtime  # pyright: ignore  # which has made the group

    there, launched = torch_xla.runtime.world_size(), max(launched_world(), dist.get_world_size())
    if there < launched:
        raise NotInitializedError(
            f"torch_xla's devices communicate among {there} of the {launched} ranks that were launched (on a CPU its "
            'processes do not): start one process, call torch.distributed.init_process_group("gloo") instead, or use '
            "an environment without torch_xla, in whose place nxd_infer.compat has one for all ranks"
        )


def refuse_xla_device(device: torch.device) -> None:
    """Raise ParallelConfigError if a Trainer's ``device`` is one of XLA's."""
    if device.type == "xla":
        raise ParallelConfigError(
            f"NeuronXLAStrategy does not train on {device} (XLA devices are not supported): leave accelerator out or "
            'pass accelerator="cpu"; nxd_infer.backends.xla.training trains there without Lightning'
        )


def _backend_of_the_devices() -> tuple[str, torch.device | None]:
    """Return the process group's backend, and this rank's GPU."""
    refuse_configured_xla()
    if not has_accelerator() or not dist.is_nccl_available():
        return "gloo", None
    name = "LOCAL_RANK" if "LOCAL_RANK" in os.environ else "RANK"
    place, here = _number(name), torch.cuda.device_count()
    if place >= here:
        raise ParallelConfigError(
            f"{name}={place}, but this machine has {here} GPU(s), and each rank needs one: start at most {here} "
            'processes here, or set CUDA_VISIBLE_DEVICES="" to train on the CPU'
        )
    torch.cuda.set_device(place)
    return "nccl", torch.device("cuda", place)


def require_no_lonely_rank(what: str) -> None:
    """Raise NotInitializedError if this process is one of several and would do ``what`` as if it were alone."""
    if default_context() is not None or current_context() is not LOCAL:
        return
    world = dist.get_world_size() if group_exists() else launched_world()
    if world > 1:
        raise NotInitializedError(
            f"{what}: this process is one of {world}, but model parallelism is not initialised, so each would do it "
            "alone: call neuronx_distributed_config() or initialize_model_parallel() first"
        )
