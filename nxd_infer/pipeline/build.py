"""Building only this rank's stages with a function that builds, fills or loads the whole model.

The function runs twice. First on the meta device, which shows which parameters, by the order in which they are
registered, belong to other ranks. Then for real: what other ranks own has addresses, so the function does not notice,
but its memory goes back to the system as soon as the next of them is written. So this rank never holds more than its
stages and one tensor, and draws the random numbers that one process draws.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nxd_infer.context import Axis
from nxd_infer.pipeline.materialise import foreign_tensors, reduce_to_stage
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.pipeline import cuts_of
from nxd_infer.pipeline.stage import Stage
from nxd_infer.util.devices import HOST, generator_states, keeping_generators, set_generator_states

Make = Callable[[], nn.Module]
Expected = list[tuple[torch.Size, bool]]
"""The shape of each parameter in the order of registration, and whether another rank owns it."""


def build_stage(make: Make, options: PipelineOptions, pp: Axis) -> tuple[nn.Module, Stage]:
    """Return the model that ``make`` builds, reduced to this rank's stages, with the values that it has there.

    If ``make`` does not work on the meta device, or computes this rank's weights from those of others, it builds the
    whole model. Raises ParallelConfigError like :func:`~nxd_infer.pipeline.pipeline.cuts_of`.
    """
    random = generator_states()
    expected = _expected(make, options, pp)
    model = None if expected is None else _own_part(make, expected)
    if model is None:
        set_generator_states(random)
        model = make()
    return model, reduce_to_stage(model, cuts_of(model, options, pp.degree), options, pp)


def _expected(make: Make, options: PipelineOptions, pp: Axis) -> Expected | None:
    order: list[nn.Parameter] = []
    try:
        with (
            keeping_generators(),
            torch.device("meta"),
            _registering(order.append),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # a state dict is not copied there
            model = make()
        others = {id(one) for one in foreign_tensors(model, cuts_of(model, options, pp.degree), pp)}
        return [(one.shape, id(one) in others) for one in order]
    except Exception:  # whatever it is, the whole model shows it again, or works
        return None


def _own_part(make: Make, expected: Expected) -> nn.Module | None:
    freeing, number = _FreeingOthers(), iter(expected)
    kept: dict[int, weakref.ref[nn.Parameter]] = {}
    """This rank's parameters, by the address of their memory, which they may share with those of others."""

    def registered(parameter: nn.Parameter) -> None:
        shape, other = next(number, (None, False))
        address = parameter.untyped_storage().data_ptr()
        if other and parameter.shape == shape:
            if address in kept and kept[address]() is not None:
                raise _Needed
            freeing.add(parameter)
        elif freeing.has(parameter):
            raise _Needed
        else:
            kept[address] = weakref.ref(parameter)

    try:
        with _registering(registered), freeing:
            return make()
    except Exception:  # as above
        return None


class _Needed(Exception):
    """What this rank keeps depends on what was freed."""


@contextlib.contextmanager
def _registering(action: Callable[[nn.Parameter], None]) -> Iterator[None]:
    """Call ``action`` for each parameter that any module registers, inside the block."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            action(parameter)

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class _FreeingOthers(TorchDispatchMode):
    """Gives back the memory of tensors that others own, and of all that is computed from them after that."""

    def __init__(self):
        super().__init__()
        self._others: dict[int, torch.UntypedStorage] = {}
        """By address. Kept, so that no other tensor gets the address."""
        self._current: int | None = None
        """The one that is being written: it still has its memory."""

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._others[storage.data_ptr()] = storage
        self._turn_to(storage.data_ptr())

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._others

    def _turn_to(self, address: int) -> None:
        if self._current not in (None, address):
            _free(self._others[self._current])
        self._current = address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor) and not value.is_meta]
        addresses = [tensor.untyped_storage().data_ptr() for tensor in given]
        if not any(address in self._others for address in addresses):
            return func(*args, **kwargs)
        written = func._schema.is_mutable
        if written and addresses[0] in self._others:
            self._turn_to(addresses[0])
            return func(*args, **kwargs)
        freed = any(address in self._others and address != self._current for address in addresses)
        if freed and written:
            raise _Needed
        result = func(*args, **kwargs)
        if not freed:
            return result
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if not made:
            raise _Needed
        for tensor in made:
            self._others.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return result


def _free(storage: torch.UntypedStorage) -> None:
    """Give the whole pages of a storage back to the system; they become zeros."""
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and sys.platform == "linux" and storage.device.type == HOST.type:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


_libc = ctypes.CDLL(None)
