"""All that is used of torch_xla's inside, in one place: most of it has no public name. For torch-xla 2.9.

It reads its environment when it is imported, or when its first program runs: whoever runs programs settles that before
(:func:`nxd_infer.backends.hlo.base.torch_xla_environment`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch_xla  # pyright: ignore[reportMissingImports]
import torch_xla.core.xla_builder as xla_builder  # pyright: ignore[reportMissingImports]
import torch_xla.core.xla_model as xla_model  # pyright: ignore[reportMissingImports]
import torch_xla.debug.metrics as metrics  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch_xla._internal import pjrt  # pyright: ignore[reportMissingImports]

import nxd_infer.comm.ops  # noqa: F401  (registers torch.ops.nxd)

_C: Any = torch_xla._XLAC
_step = threading.Lock()


# --- devices ------------------------------------------------------------------------------------------


def replicate(degree: int) -> list[str]:
    """This process's devices, of which programs will use ``degree``; to be called once, before any program runs.

    Without it a collective among several devices is silently none at all.
    """
    if degree > 1:
        pjrt.initialize_multiprocess(0, 1)
    return list(xla_model.get_xla_supported_devices())


def use_device(device: str) -> None:
    """``"xla"`` without an index means this device, in this thread from now on."""
    _C._xla_set_default_device(device)


def step() -> None:
    """Compile what was recorded for this thread's device, and start it.

    One thread at a time: the first one compiles, the others find its program.
    """
    with _step:
        torch_xla.sync(wait=False)


def wait(*devices: str) -> None:
    """Wait for all that was started on these devices; on all, if none is named.

    That holds the first ones up meanwhile: all must have started what the others wait for.
    """
    xla_model.wait_device_ops(xla_model.xla_real_devices(list(devices)))


# --- programs -----------------------------------------------------------------------------------------


def computation(name: str, hlo: bytes) -> Any:
    """A program from the bytes of an HLO module. Raises RuntimeError for what is none."""
    return xla_builder.computation_from_module_proto(name, hlo)


def record(program: Any, values: Sequence[Tensor]) -> list[Tensor]:
    """Record a call of ``program``; it runs with the next :func:`step`."""
    return list(_C._xla_user_computation("xla::_op_nxd_body", list(values), program))


# --- lowering -----------------------------------------------------------------------------------------


def parameter(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor that stands for a parameter of a program, and has no memory."""
    return xla_builder.create_placeholder_tensor(list(shape), dtype)


@contextlib.contextmanager
def numbers_as_constants() -> Iterator[None]:
    """Plain numbers become constants of the program inside the block, not parameters that nobody knows."""
    before = _C._get_xla_all_numbers_special_scalars()
    _C._set_xla_all_numbers_special_scalars(True)
    try:
        yield
    finally:
        _C._set_xla_all_numbers_special_scalars(before)


class Lowering:
    """HLO of what was recorded for ``results``."""

    def __init__(self, results: Sequence[Tensor]):
        self._context = _C.lowering.LoweringContext("body")
        self._context.build(list(results))

    def hlo(self) -> bytes:
        return self._context.hlo()

    def json(self) -> str:
        """The module as JSON, as protobuf writes it."""
        return self._context.hlo_json()

    def number(self, tensor: Tensor) -> int | None:
        """Which parameter ``tensor`` is; None if nothing depends on it."""
        found = self._context.tensor_parameter_id(tensor)
        return None if found < 0 else found

    def parameters(self) -> dict[int, Tensor]:
        """Every parameter; those that nobody gave stand for a number. They hold no values."""
        return self._context.device_parameter_id_tensor_mapping()


def forget_metrics() -> None:
    metrics.clear_all()


def left_the_device() -> list[str]:
    """Operators that ran on the host since :func:`forget_metrics`, and whether a program was run in between."""
    found = sorted(name.replace("::", ".") for name in metrics.counter_names() if name.startswith("aten::"))
    executed = metrics.metric_data("ExecuteTime")
    return [*found, *(["a program was run"] if executed and executed[0] else [])]


# --- collectives --------------------------------------------------------------------------------------
# With explicit groups, and layouts that are not pinned: that form would have the rank in the program. Each starts from
# a new token: torch_xla multiplies the token by a value of each result and adds it to what is exchanged next, so one
# infinity would make all that comes later NaN. Ranks that run one program do its collectives in one order without it.
#
# ``groups`` are the axis's groups among all replicas; the default is one of the first ``degree`` of them.

Groups = list[list[int]]


def all_reduce(x: Tensor, axis: str, op: str, degree: int, groups: Groups | None = None) -> Tensor:
    return _done(_C._xla_all_reduce(op, x, 1.0, groups or _one(degree), False))


def all_gather(x: Tensor, axis: str, dim: int, degree: int, groups: Groups | None = None) -> Tensor:
    return _done(_C._xla_all_gather(x, dim, degree, groups or _one(degree), False, None, None))


def reduce_scatter(x: Tensor, axis: str, dim: int, degree: int, groups: Groups | None = None) -> Tensor:
    token = _C._get_all_reduce_token(str(x.device))
    result, _ = _C._xla_reduce_scatter("sum", x, token, 1.0, dim, degree, groups or _one(degree), False, None, None)
    return _done(result)


def broadcast(x: Tensor, axis: str, source: int, degree: int, groups: Groups | None = None) -> Tensor:
    """torch_xla's own has the rank in its program; this one takes the source's row of all."""
    return all_gather(x[None], axis, 0, degree, groups)[source]


def _done(result: Tensor) -> Tensor:
    _C._set_all_reduce_token(str(result.device), None)
    return result


def _one(degree: int) -> Groups:
    return [list(range(degree))]


COLLECTIVES = {
    torch.ops.nxd.all_reduce.default: all_reduce,
    torch.ops.nxd.all_gather.default: all_gather,
    torch.ops.nxd.reduce_scatter.default: reduce_scatter,
    torch.ops.nxd.broadcast.default: broadcast,
}
"""What stands for each operator that names an axis."""
