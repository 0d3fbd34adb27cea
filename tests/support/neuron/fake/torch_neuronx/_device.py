"""The device ``privateuseone``, of which a tensor can be made of zeros, copied into, and copied to the host."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

_SEEN = {"shape", "dtype", "device", "layout", "requires_grad", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"}
_kept: list[Any] = []


class DeviceTensor(Tensor):
    """A tensor in a core's memory. ``host`` is what it holds; only this stand-in looks there."""

    host: Tensor
    rank: int

    @staticmethod
    def __new__(cls: Any, host: Tensor, rank: int) -> DeviceTensor:
        if not host.is_contiguous():
            raise RuntimeError("a tensor that is not contiguous was loaded")
        made = Tensor._make_wrapper_subclass(
            cls, host.shape, dtype=host.dtype, device=torch.device("privateuseone", rank)
        )
        made.host, made.rank = host, rank
        return made

    def __repr__(self) -> str:
        return f"DeviceTensor(rank={self.rank}, shape={list(self.host.shape)}, dtype={self.host.dtype})"

    @classmethod
    def __torch_function__(cls: Any, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__" and getattr(func.__self__, "__name__", "") in _SEEN:
            return Tensor.__torch_function__.__func__(Tensor, func, (), args, kwargs or {})
        if name == "cpu" and len(args) == 1:
            return args[0].host.clone()
        if name == "copy_" and len(args) == 2 and isinstance(args[0], DeviceTensor):
            to, source = args
            if isinstance(source, DeviceTensor) or source.device.type != "cpu":
                raise RuntimeError("copy_ on a core takes a tensor of the host")
            if (source.shape, source.dtype) != (to.host.shape, to.host.dtype) or not source.is_contiguous():
                raise RuntimeError(f"copy_ of {source.dtype}{list(source.shape)} into {to!r}")
            to.host.copy_(source)
            return to
        raise RuntimeError(f"{name or func} of a tensor on a core is not in the contract")

    @classmethod
    def __torch_dispatch__(cls: Any, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor on a core is not in the contract")


def register() -> None:
    module = types.ModuleType("torch.privateuseone")
    vars(module).update(is_available=lambda: True, device_count=lambda: 64, current_device=lambda: 0)
    torch._register_device_module("privateuseone", module)
    library = torch.library.Library("aten", "IMPL")
    library.impl("zeros", _zeros, "PrivateUse1")
    _kept.append(library)


def _zeros(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    if device is None or device.index is None:
        raise RuntimeError("a tensor on a core names its rank: privateuseone:0")
    return DeviceTensor(torch.zeros(size, dtype=dtype), device.index)
