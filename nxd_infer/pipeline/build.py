"""Building only this rank's stages with a function that builds, fills or loads the whole model.

The function runs twice. First on the meta device, which shows which parameters, by the order in which they are
registered, belong to other ranks. Then for real: what other ranks own has addresses, so the function does not notice,
but its memory goes back to the system as soon as the next of them is written. So this rank never holds more than its
stages and one tensor, and draws the random numbers that one process draws.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import math
import mmap
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nxd_infer.context import Axis
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout.params import restore_attributes
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.pipeline import cuts_of
from nxd_infer.pipeline.stage import Stage, find_units, find_weights, take_stage
from nxd_infer.pipeline.tracing import say_what_has_no_effect, trace_around_units
from nxd_infer.util.devices import HOST, generator_states, keeping_generators, set_generator_states, transport_device

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


Fill = Callable[..., object]
"""``(module)`` or ``(module, device)``."""


def keep_stage(model: nn.Module, options: PipelineOptions, pp: Axis, fill: Fill | None) -> Stage:
    """Reduce ``model``, in place, to this rank's stages, and fill what of them is on the meta device.

    So no rank ever holds more than its stages. All weights of the model are drawn all the same, module by module, so
    that the stages are parts of the model that one process would build.
    """
    cuts = cuts_of(model, options, pp.degree)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        fill_modules(model, fill, {id(tensor) for tensor in foreign_tensors(model, cuts, pp)})
    return reduce_to_stage(model, cuts, options, pp)


def foreign_tensors(model: nn.Module, cuts: Sequence[str], pp: Axis) -> list[Tensor]:
    """Return the parameters and buffers of a whole model that other ranks own."""
    weights = find_weights(model, find_units(model, cuts)).values()
    return [
        getattr(model.get_submodule(path), name)
        for weight in weights
        if weight.stage % pp.degree != pp.rank
        for path, name in weight.places[:1]
    ]


def reduce_to_stage(model: nn.Module, cuts: Sequence[str], options: PipelineOptions, pp: Axis) -> Stage:
    """Reduce ``model``, in place, to this rank's stages, after the graph tracing that ``options`` ask for."""
    say_what_has_no_effect(options)
    if options.tracer_cls is not None and pp.degree > 1:
        trace_around_units(model, cuts, options)
    return take_stage(model, cuts, pp.rank, pp.degree)


def fill_modules(model: nn.Module, fill: Fill | None, foreign: Collection[int] = ()) -> None:
    """Allocate and fill the modules of ``model`` one after another; what is ``foreign`` goes back to the meta device.

    All are filled on the host, whose random numbers are those of a model that is built there, and then moved to the
    device of the process group.
    ``fill`` gets every module, and the host as its second argument if it takes one; None calls ``reset_parameters`` of
    those that directly hold weights, buffers or other tensors without values. Ties and the attributes of parameters are
    kept. Raises ParallelConfigError for a module that has none, and for a buffer or another tensor that is left without
    values.
    """
    made: dict[int, Tensor] = {}
    alive: list[Tensor] = []
    """The tensors of the meta device, whose ids are the keys of ``made``."""
    for name, module in model.named_modules():
        slots: list[tuple[dict[str, Any], str, Tensor]] = [
            (table, key, tensor)
            for table in (module._parameters, module._buffers)
            for key, tensor in table.items()
            if tensor is not None and tensor.is_meta
        ]
        held = _meta_attributes(module)
        if fill is None and not (module._parameters or module._buffers or held):
            continue
        if (slots or held) and fill is None and not hasattr(module, "reset_parameters"):
            raise ParallelConfigError(
                f"meta_device_init=True: {name or type(module).__name__} cannot initialise itself (no "
                'reset_parameters); pass model_init_config={"param_init_fn": function of a module}'
            )
        for table, key, tensor in slots:
            table[key] = made[id(tensor)] if id(tensor) in made else _allocated(tensor)
        if fill is not None:
            with torch.no_grad():
                fill(*(module, HOST)[: 1 + _takes_device(fill)])
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]
        _require_values(name, module, slots)
        for table, key, tensor in slots:
            if id(tensor) in foreign:
                table[key] = tensor
            else:
                made[id(tensor)] = table[key]
                alive.append(tensor)
    if (device := transport_device()) != HOST:
        for tensor in made.values():
            moved = tensor.data.to(device)
            if torch._has_compatible_shallow_copy_type(tensor, moved):  # pyright: ignore  # else the model moves
                tensor.data = moved
    restore_attributes(model)


def _takes_device(fill: Fill) -> bool:
    try:
        parameters = list(inspect.signature(fill).parameters.values())
    except (TypeError, ValueError):  # of C
        return False
    second = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][1:2]
    return bool(second) and (second[0].default is inspect.Parameter.empty or second[0].name == "device")


def _require_values(name: str, module: nn.Module, slots: Sequence[tuple[Any, str, Tensor]]) -> None:
    """Raise ParallelConfigError for what has no values yet, nor gets them when a state dict is loaded."""
    held = _meta_attributes(module)
    for _, key, _ in slots:
        buffer = module._buffers[key] if key in module._non_persistent_buffers_set else None
        if buffer is not None and buffer.numel() and (blank := _blank(buffer.dtype)) is not None:
            same = buffer.isnan() if blank != blank else buffer == blank
            held += [key] if bool(same.all()) else []
    if held:
        raise ParallelConfigError(
            f"meta_device_init=True: {name or type(module).__name__} ({type(module).__name__}) has no values in "
            f"{', '.join(held)}; fill them in param_init_fn, which gets this module (of a model of transformers: "
            "model._init_weights(module)), or build the model without meta_device_init"
        )


def _meta_attributes(module: nn.Module) -> list[str]:
    return [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]


def _blank(dtype: torch.dtype) -> float | None:
    """Return what a tensor is filled with that nobody has filled yet, by which it is known."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return None if dtype == torch.bool else torch.iinfo(dtype).max


def _allocated(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device=HOST)
    if not isinstance(tensor, nn.Parameter):
        blank = _blank(tensor.dtype)
        return made if blank is None else made.fill_(blank)
    parameter = nn.Parameter(made, tensor.requires_grad)
    for mark, value in vars(tensor).items():
        setattr(parameter, mark, value)
    return parameter
