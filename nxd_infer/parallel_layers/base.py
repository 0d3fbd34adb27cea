"""The base of the parallel layers: context, parameter layouts, initialisation, and index buffers.

A parameter is initialised by filling its *logical* tensor exactly as ``nn.Linear`` or ``nn.Embedding`` would, drawing
from the generator in the same order, and keeping this rank's part. So one seed gives one model at any degree.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules.module import register_module_parameter_registration_hook

from nxd_infer.context import AxisGroup, current_context
from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, ParamLayout, attach_layout, layout_of, restore_attributes
from nxd_infer.layout.runs import Fill as Filling
from nxd_infer.layout.runs import Run, coalesce
from nxd_infer.layout.shard import fill_tensor
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.mappings import axis_of
from nxd_infer.util.devices import CHECKED, HOST, on_host

Fill = Callable[[Tensor], object]
"""Fills a tensor in place."""


def init_linear_weight(weight: Tensor) -> None:
    """Fill a weight as ``nn.Linear`` and ``nn.Conv2d`` do."""
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def init_linear_bias(fan_in: int) -> Fill:
    """Return the fill that ``nn.Linear`` uses for its bias; ``fan_in`` is the logical one, not a rank's."""
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    return partial(torch.nn.init.uniform_, a=-bound, b=bound)


@torch.no_grad()
def logical_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: Fill) -> Tensor:
    """Return a full logical tensor, filled by ``fill``."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    fill(whole)
    return whole


DeviceLike = torch.device | str | int | bool | None
Self = TypeVar("Self", bound="ParallelLayer")


def device_of(device: DeviceLike) -> torch.device | None:
    """Return a torch.device, or None for PyTorch's default. ``False``, the documented default, also means None."""
    if device is None or device is False:
        return None
    if device is True:
        raise ParallelConfigError(f"device must be a torch.device, a name such as {HOST.type!r}, or None; got True")
    return torch.device(device)


def whole_size(size: Any) -> int:
    """Return a layer's size, also one of numpy's, as an int. Raises ParallelConfigError for anything else."""
    try:
        return operator.index(size)
    except TypeError:
        raise ParallelConfigError(f"the sizes of a layer must be whole numbers, got {size!r}") from None


def require_inside(ids: Tensor, vocabulary: int, what: str) -> None:
    """Raise IndexError for an id outside the vocabulary; on CUDA a device-side assertion. A graph does not check."""
    if torch.compiler.is_compiling() or type(ids) is not Tensor or ids.is_meta or not ids.numel():
        return
    if on_host(ids):
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high >= vocabulary:
            bad = low if low < 0 else high
            raise IndexError(f"{what} {bad} is outside the vocabulary: {what}s must be 0 to {vocabulary - 1}")
    elif ids.device.type in CHECKED:
        inside = ((ids >= 0) & (ids < vocabulary)).all()
        torch.ops.aten._assert_async.msg(inside, f"a {what} is outside the vocabulary of {vocabulary}")


def size_plan(size: int, stride: int = 1, pad: bool = False, multiple: int = 1) -> AxisPlan:
    """Return the plan of an axis of ``size``: equal pieces of each of ``stride`` sections, padded on request."""
    size = whole_size(size)
    if not pad:
        return AxisPlan.strided(size, stride)
    if stride == 1:
        return AxisPlan.padded(size, multiple)
    section = AxisPlan.strided(size, stride).size // stride
    return AxisPlan.sections([AxisPlan.padded(section, multiple)] * stride)


@contextlib.contextmanager
def real_cpu_tensors() -> Iterator[None]:
    """Create real CPU tensors inside, even while a model is built on the meta device or with fake tensors."""
    with unset_fake_temporarily(), HOST:
        yield


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters of modules that this thread makes on the meta device; buffers have their values, which are small.

    Each parameter is allocated and dropped again before the next one. Tied ones stay one, and attributes are kept.
    """
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, param: Any) -> nn.Parameter | None:
        if param is None or param.is_meta or threading.get_ident() != thread:
            return None
        if not hasattr(param, "_nxd_on_meta"):
            light: Any = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            vars(light).update(vars(param))
            param._nxd_on_meta = light
        return param._nxd_on_meta

    handle = register_module_parameter_registration_hook(to_meta)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        handle.remove()


class ParallelLayer(nn.Module):
    """A module whose parameters are sharded over one axis.

    It keeps the context that it was built in, for forward and backward. Without a context its degree is 1 and it is
    plain PyTorch. It holds an axis *name* instead of a process group, so it can be copied and pickled.
    """

    def __init__(self, process_group: object = None):
        super().__init__()
        self.context = current_context()
        self.axis = axis_of(process_group, self.context)
        self.master_weight: Tensor | None = None
        self.master_bias: Tensor | None = None
        self._index_values: dict[str, Tensor | None] = {}

    @property
    def degree(self) -> int:
        return self.context.axis(self.axis).degree

    @property
    def rank(self) -> int:
        return self.context.axis(self.axis).rank

    @property
    def tensor_parallel_group(self) -> AxisGroup:
        """The axis name, which every function of this package accepts as a group."""
        return AxisGroup(self.axis)

    tensor_model_parallel_group = tensor_parallel_group

    # --- parameters -----------------------------------------------------------------------------------

    def new_parameter(
        self, name: str, dtype: torch.dtype, device: torch.device | None, sources: Any = None, stride: int = 1
    ) -> None:
        """Register an empty parameter of this rank's shape, with its layout attached.

        A parameter without a sharded axis is replicated and gets no layout.
        """
        axes = [axis if isinstance(axis, AxisPlan) else whole_size(axis) for axis in self.axes_of(name)]
        shape = ParamLayout.of(axes).rank_shape(self.degree)
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        self._attach(name, sources, stride)

    def _attach(self, name: str, sources: Any, stride: int) -> None:
        layout = ParamLayout.of(self.axes_of(name), sources)
        if layout.sharded or layout.expert_dim >= 0:
            attach_layout(self, name, layout, degree=self.degree, stride=stride)

    def plans_changed(self) -> None:
        """Derive sizes and indices from the layer's plans."""

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        """Return the axes of a parameter under the layer's current plans."""
        raise NotImplementedError(f"{type(self).__name__} does not say how {name!r} is laid out")

    def init_parameter(self, name: str, fills: Fill | dict[str, Fill], keep_master: bool = False) -> Tensor | None:
        """Fill a parameter with its part of newly drawn logical tensors (one ``Fill`` per source).

        With ``keep_master``, return the master weight in at least float32. Does nothing on the meta device.
        """
        param, layout = getattr(self, name), layout_of(self, name)
        if param.is_meta:
            return None
        dtype = torch.promote_types(param.dtype, torch.float32) if keep_master else param.dtype
        if layout is None:
            layout = ParamLayout.of(list(param.shape))
        shapes = layout.logical_shapes or {"": tuple(plan.size for plan in layout.axes)}
        by_name = fills if isinstance(fills, dict) else dict.fromkeys(shapes, fills)
        masters = {
            source: logical_tensor(shape, dtype, param.device, by_name[source]) for source, shape in shapes.items()
        }
        fill_tensor(param.detach(), masters, layout.rank_layout(self.degree, self.rank))
        return next(iter(masters.values())) if keep_master else None

    def require_divisible(self, what: str, plan: AxisPlan) -> None:
        """Raise ShardingError if the axis does not divide and is not padded."""
        fix = "build the layer (and the one it is paired with) with pad=True" if hasattr(self, "pad") else ""
        plan.require_exact(self.degree, f"{type(self).__name__}: {what}", fix)

    # --- index buffers: constants that are equal on every rank -----------------------------------------

    def use_index(self, name: str, index: Tensor | None) -> None:
        """Register ``index`` (int64, or None) as a non-persistent buffer that survives ``to_empty``."""
        self._index_values[name] = index
        device = next((p.device for p in self._parameters.values() if p is not None and not p.is_meta), None)
        value = index if index is None or device is None else index.to(device)
        self.register_buffer(name, value, persistent=False)

    def gather_output_features(self, y: Tensor, plan: AxisPlan, index_name: str, dim: int = -1) -> Tensor:
        """Gather the ranks' outputs into the logical ones in order: drop padding, take replicas once."""
        y = mappings.gather_from_tensor_model_parallel_region_with_dim(y, dim, self.axis, context=self.context)
        index = getattr(self, index_name)
        if index is not None:
            return y.index_select(dim, index)
        return y.narrow(dim, 0, plan.size) if y.shape[dim] != plan.size else y

    def scatter_input_features(self, x: Tensor, plan: AxisPlan, index_name: str, dim: int = -1) -> Tensor:
        """Reduce all logical inputs to this rank's: lay them out by ``plan``, then split evenly."""
        if x.shape[dim] != plan.size:  # an index would take any larger size, and padding a smaller one
            raise ShardingError(f"{type(self).__name__}: expected {plan.size} input features, got {x.shape[dim]}")
        index = getattr(self, index_name)
        if index is not None:
            x = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim).index_select(dim, index)
        elif plan.padded_size(self.degree) != plan.size:
            x = F.pad(x, [0, 0] * (-dim - 1) + [0, plan.padded_size(self.degree) - plan.size])
        return mappings.scatter_to_tensor_model_parallel_region_with_dim(x, dim, self.axis, context=self.context)

    def gather_index_of(self, plan: AxisPlan) -> Tensor | None:
        """Return the index for :meth:`gather_output_features`, or None if it only needs to cut off the end."""
        return self._index(plan, plan.gather_index)

    def scatter_index_of(self, plan: AxisPlan) -> Tensor | None:
        """Return the index for :meth:`scatter_input_features`, or None if it only needs zeros at the end."""
        return self._index(plan, plan.scatter_index)

    def _index(self, plan: AxisPlan, make: Callable[[int], Tensor | None]) -> Tensor | None:
        if self._in_order(plan):
            return None
        with real_cpu_tensors():
            return make(self.degree)

    def _in_order(self, plan: AxisPlan) -> bool:
        """Return whether the gathered axis is the logical one, possibly with padding at its end."""
        pieces = coalesce(piece for rank in range(self.degree) for piece in plan.runs(self.degree, rank))
        return not plan.sharded or pieces[:1] == (Run("", 0, plan.size),)

    # --- gradients of weights whose axis repeats elements or holds padding -------------------------------

    def elements_of(self, plan: AxisPlan) -> mappings.Elements | None:
        """Return the element map for :meth:`logical`, or None if each local element is one logical element."""
        repeated = plan.duplicated(self.degree)
        if not repeated and not any(isinstance(piece, Filling) for piece in plan.runs(self.degree, self.rank)):
            return None
        with real_cpu_tensors():
            return mappings.Elements(plan.rank_index(self.degree, self.rank), plan.size, repeated)

    def logical(self, param: Tensor, elements: mappings.Elements | None, dim: int = 0) -> Tensor:
        """Return ``param`` with the logical gradient: copies of an element share one gradient, padding gets none."""
        return mappings.with_logical_gradient(param, elements, dim, self.axis, context=self.context)

    # --- keep the layout when parameters are replaced ---------------------------------------------------

    def _apply(self: Self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        restore_attributes(self)
        for name, index in self._index_values.items():
            buffer = getattr(self, name)
            if index is not None and not buffer.is_meta:
                buffer.copy_(index)  # to_empty() has just erased it
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        restore_attributes(self)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        restore_attributes(self)  # load_state_dict(assign=True) replaces the parameters


class WeightAndBias(ParallelLayer):
    """A layer of a ``weight`` and a ``bias`` (or None), initialised as ``nn.Linear`` and ``nn.Conv2d`` are."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    init_method: Fill | None
    keep_master_weight: bool
    fan_in: int
    """The logical inputs of an output."""
    shown: tuple[str, ...] = ()
    """Attributes that the layer's text has."""

    def extra_repr(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in self.shown]
        return ", ".join([*shown, f"bias={self.bias is not None}", f"{self.axis}={self.degree}"])

    def make_parameters(self, bias: bool, dtype: torch.dtype, device: DeviceLike, stride: int = 1) -> None:
        """Register and initialise the parameters, after the layer's plans are set."""
        self.plans_changed()
        self.new_parameter("weight", dtype, device_of(device), stride=stride)
        if bias:
            self.new_parameter("bias", dtype, device_of(device), stride=stride)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give the layer the logical weights that PyTorch's own would have after the same seed."""
        self.init_weight_cpu()
        self._init_bias()

    def init_weight_cpu(self) -> None:
        """Fill the weight alone, as :meth:`reset_parameters` does."""
        fill = self.init_method or init_linear_weight
        self.master_weight = self.init_parameter("weight", fill, keep_master=self.keep_master_weight)

    def _init_bias(self) -> None:
        if self.bias is not None:
            fill = init_linear_bias(self.fan_in)
            self.master_bias = self.init_parameter("bias", fill, keep_master=self.keep_master_weight)
