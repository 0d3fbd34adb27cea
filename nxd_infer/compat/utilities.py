"""``neuronx_distributed.utils``: what a script asks about its machine and its rank."""

from __future__ import annotations

import copy
import enum
import importlib.util
import logging
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError, ShardingError

DEVICE_FILE = "/dev/neuron0"
NXD_SKIP_RENDEZVOUS = "NXD_SKIP_RENDEZVOUS"
"""A variable of the environment, set in a rank of a trace."""


def always(value: Any) -> Callable[..., Any]:
    """Return a function that returns ``value``, whatever it is asked."""
    return lambda *_, **__: copy.copy(value)


is_torch_version_greater_than_2, requires_init_pg_override = always(True), always(False)
"""No older PyTorch is supported, and ``init_process_group`` needs no other initialisation for XLA."""


def cpu_mode() -> bool:
    """Return whether nothing runs on a Neuron device: there is none here, or ``NXD_CPU_MODE`` is above 0."""
    return int(os.environ.get("NXD_CPU_MODE") or 0) > 0 or not os.path.exists(DEVICE_FILE)


def get_platform_target() -> str:
    """Return the Neuron platform: ``NEURON_PLATFORM_TARGET_OVERRIDE``, else ``"trn1"``, also without a device."""
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or "trn1"


def is_pjrt_device() -> bool:
    """Return whether torch_xla drives a Neuron device."""
    return not cpu_mode()


class hardware(enum.Enum):
    """A generation of Neuron devices: ``hardware("inf2") is hardware.TRN1``."""

    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"

    @classmethod
    def _missing_(cls, value: object) -> hardware:
        name = str(value).lower().partition(".")[0]
        for generation in cls:
            if name.startswith(generation.value) or (generation is cls.TRN1 and name == "inf2"):
                return generation
        raise ParallelConfigError(f"there is no Neuron hardware {value!r}: it is inf2, trn1, trn2 or trn3")


class LogicalNCConfig(enum.IntEnum):
    """Physical cores that make one logical core."""

    LNC_1 = 1
    LNC_2 = 2


def get_platform_lnc() -> LogicalNCConfig:
    """Return how many physical cores make a logical one: ``NEURON_LOGICAL_NC_CONFIG``, else the platform's default."""
    default = 1 if hardware(get_platform_target()) is hardware.TRN1 else 2
    return LogicalNCConfig(int(os.environ.get("NEURON_LOGICAL_NC_CONFIG") or default))


class _OnRank0(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return int(os.environ.get("RANK") or current_context().rank) == 0


def get_logger(name: str = "neuronx_distributed", rank0_only: bool = True) -> logging.Logger:
    """Return the logger of a name; with ``rank0_only`` the other ranks say nothing."""
    if isinstance(name, bool):  # the reference's first place
        name, rank0_only = "neuronx_distributed", name
    logger = logging.getLogger(name)
    logger.filters = [one for one in logger.filters if not isinstance(one, _OnRank0)]
    if rank0_only:
        logger.addFilter(_OnRank0())
    return logger


def rmsg(message: object) -> str:
    """Return a message with this rank's place before it."""
    here = current_context()
    return f"[rank_{here.rank}_pp{here.pp.rank}_tp{here.tp.rank}_dp{here.dp.rank}_cp{here.cp.rank}] {message}"


def get_gloo_group() -> Any:
    """Return the process group of all ranks, which is gloo's on a CPU; elsewhere all ranks call this to make one."""
    return dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def is_hf_transformers_available() -> bool:
    return importlib.util.find_spec("transformers") is not None


def cumsum(tensor: Tensor) -> Tensor:
    """Return the sums of the rows up to each."""
    return tensor.cumsum(0)


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and PyTorch, and the streams of the tensor-parallel ranks."""
    from nxd_infer.parallel_layers.random import model_parallel_xla_manual_seed

    random.seed(seed)
    np.random.seed(seed)
    model_parallel_xla_manual_seed(seed)


def get_batch_on_this_context_parallel_rank(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with this context parallel rank's piece of each sequence.

    Tensors are [batch, sequence, ...]; an attention mask of four dimensions is [batch, 1, queries, keys], and its
    queries are split. Other values stay. Raises ShardingError for a length that does not divide.
    """
    cp = current_context().cp
    pieces = dict(batch)
    for name, value in batch.items() if cp.degree > 1 else ():
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        dim = 2 if name == "attention_mask" and value.dim() == 4 else 1
        if value.shape[dim] % cp.degree:
            raise ShardingError(
                f"{name!r} of shape {tuple(value.shape)} does not divide over {cp.degree} context parallel ranks: pad "
                "its sequences"
            )
        pieces[name] = torch.chunk(value, cp.degree, dim)[cp.rank]
    return pieces
