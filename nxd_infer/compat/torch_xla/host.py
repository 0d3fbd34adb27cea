"""The device "xla" is the CPU, and the process group "xla" is gloo's, for all of PyTorch in this process.

* **Creating tensors** (``torch.zeros(2, device="xla")``, ``nn.Linear(2, 2, device="xla")``): PyTorch's dispatcher asks
  XLA's kernels for memory; two are registered here, which give the CPU's. Nothing else is slower for it.
* **Moving tensors** (``tensor.to("xla")``, ``module.to("xla")``), and what copies data into a new tensor
  (``torch.tensor(data, device="xla")``): PyTorch looks for XLA's runtime before it dispatches, so these functions are
  replaced by ones that pass the CPU's device on (a microsecond a call). As for any tensor that is where it should be,
  ``to`` returns the tensor itself, and so does ``cpu()``.
* ``torch.autocast("xla")`` is the CPU's, and ``torch.load(..., map_location="xla")`` loads there.

Out of reach: ``torch.Generator("xla")``, ``torch.tril_indices(..., device="xla")``, and the *word* "xla" in code that
torch.compile or torch.export trace, where ``torch_xla.device()`` works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.jit import _builtins
from torch.utils import _device

from nxd_infer.comm.distributed import leave_at_exit
from nxd_infer.comm.launched import launched_world
from nxd_infer.util.devices import HOST, group_exists

_COPYING = ((torch, "as_tensor"), (torch, "asarray"), (torch, "tensor"), (Tensor, "new_tensor"), (Tensor, "to"))

_undo: list[Callable[[], None]] = []
_joined = False
"""Whether a collective has started the process group, before the script did."""


def is_xla(device: object) -> bool:
    """Return whether ``device`` names one of XLA's."""
    if isinstance(device, str):
        return device.startswith("xla")
    return isinstance(device, torch.device) and device.type == "xla"


def install() -> None:
    """Let XLA's devices be the CPU. Idempotent."""
    if _undo:
        return
    kernels = torch.library.Library("aten", "IMPL", "XLA")
    kernels.impl("empty.memory_format", functools.partial(_allocate, torch.empty))
    kernels.impl("empty_strided", functools.partial(_allocate, torch.empty_strided))
    _undo.append(kernels._destroy)
    _device._device_constructors()  # remembers PyTorch's own, which `with torch.device(...)` is asked about
    _replace(_device.DeviceContext, "__init__", _on(HOST, _device.DeviceContext.__init__))
    for owner, name in _COPYING:
        old, new = getattr(owner, name), _on(HOST, getattr(owner, name))
        new.__module__, new.__qualname__ = torch.__name__, name if owner is torch else f"Tensor.{name}"  # for pickle
        _replace(owner, name, new)
        if (operator := _builtins._find_builtin(old)) is not None:  # torch.jit.script knows functions by their id
            _builtins._register_builtin(new, operator)  # pyright: ignore[reportArgumentType]
            _undo.append(functools.partial(_builtins._get_builtin_table().pop, id(new), None))  # pyright: ignore
    _replace(torch.autocast, "__init__", _on(HOST.type, torch.autocast.__init__))
    for name, function in (("init_process_group", _init_process_group), ("new_group", _new_group)):
        original = getattr(dist, name)
        for owner in (dist, dist.distributed_c10d):
            _replace(owner, name, functools.update_wrapper(functools.partial(function, original), original))
    if not any(load is _load for _, _, load in torch.serialization._package_registry):
        torch.serialization.register_package(0, lambda storage: None, _load)


def uninstall() -> None:
    """Let XLA's devices be what they were."""
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
    inherited, old = name not in vars(owner), getattr(owner, name)
    setattr(owner, name, new)
    _undo.append(lambda: delattr(owner, name) if inherited else setattr(owner, name, old))


def _allocate(make: Callable[..., Tensor], *sizes: Any, device: Any = None, **options: Any) -> Tensor:
    return make(*sizes, device=HOST, **{name: value for name, value in options.items() if value is not None})


def _on(place: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, called with ``place`` for every argument that is a device of XLA's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs = {name: place if is_xla(value) else value for name, value in kwargs.items()}
        return function(*[place if is_xla(value) else value for value in args], **kwargs)

    return call


def autocast(device: Any, **options: Any) -> torch.autocast:
    """Return ``torch.autocast`` for the CPU: ``torch_xla.amp.autocast``."""
    return torch.autocast(HOST.type, **options)


def _load(storage: Any, location: str) -> Any:
    return storage if location.startswith("xla") else None


# --- process groups -------------------------------------------------------------------------------------


def join() -> None:
    """Start the process group of ranks that a launcher has started and the script has not, as collectives do."""
    global _joined
    if not group_exists() and launched_world() > 1:
        dist.init_process_group("xla")
        _joined = True


def _init_process_group(
    original: Callable[..., None], backend: Any = None, init_method: Any = None, *args: Any, **options: Any
) -> None:
    """Start gloo for the backend "xla" and for "xla://": with the launcher's ranks, or alone if there are none."""
    global _joined
    if not is_xla(backend) and not is_xla(init_method):
        return original(backend, init_method, *args, **options)
    if _joined and group_exists():
        _joined = False
        return None
    if launched_world() == 1 and options.get("world_size", -1) in (-1, 1):
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # pyright: ignore
    original("gloo", None if is_xla(init_method) else init_method, *args, **options)
    return leave_at_exit()


def _new_group(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Start a group of gloo's for the backend "xla"; without options for XLA's compiler."""
    args = tuple("gloo" if is_xla(value) else value for value in args)
    options = {name: "gloo" if is_xla(value) else value for name, value in options.items()}
    if isinstance(given := options.get("pg_options"), dict) and given.keys() == {"xla_pg_options"}:
        del options["pg_options"]
    return original(*args, **options)
