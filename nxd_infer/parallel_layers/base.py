"""What the parallel layers share: their context, their parameters' layouts, initialisation, and index buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan, ParamLayout, attach_layout, layout_of, restore_attributes
from nxd_infer.layout.runs import Fill as Filling
from nxd_infer.layout.runs import Run, coalesce
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.groups import axis_of
from nxd_infer.parallel_layers.initialization import Fill, keep_own_part, logical_tensor
from nxd_infer.util.devices import HOST

DeviceLike = torch.device | str | int | bool | None
Self = TypeVar("Self", bound="ParallelLayer")


def device_of(device: DeviceLike) -> torch.device | None:
    """A torch.device, or None for PyTorch's default one. ``False`` (the document's default) is None too."""
    if device is None or device is False:
        return None
    if device is True:
        raise ParallelConfigError(f"device must be a torch.device, a name such as {HOST.type!r}, or None; got True")
    return torch.device(device)


def size_plan(size: int, stride: int = 1, pad: bool = False, multiple: int = 1) -> AxisPlan:
    """The plan of an axis of ``size``: equal pieces of each of ``stride`` sections, padded when asked for."""
    if not pad:
        return AxisPlan.strided(size, stride)
    if stride == 1:
        return AxisPlan.padded(size, multiple)
    section = AxisPlan.strided(size, stride).size // stride
    return AxisPlan.sections([AxisPlan.padded(section, multiple)] * stride)


@contextlib.contextmanager
def real_cpu_tensors() -> Iterator[None]:
    """Inside, tensors have values, even while a model is built on the meta device or out of fake tensors."""
    with unset_fake_temporarily(), HOST:
        yield


class ParallelLayer(nn.Module):
    """A module whose parameters are cut over one axis.

    It keeps the context it was built with, and uses it forward and backward; built without any, its degree is 1 and
    it is plain PyTorch. It holds an axis *name* and no process group, so it can be copied and pickled.
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
    def tensor_parallel_group(self) -> str:
        """The axis name; every function of this package that takes a group takes it."""
        return self.axis

    # --- parameters -----------------------------------------------------------------------------------

    def new_parameter(
        self, name: str, dtype: torch.dtype, device: torch.device | None, sources: Any = None, stride: int = 1
    ) -> None:
        """Register an empty parameter of this rank's shape that carries its layout.

        A parameter without a sharded axis gets no layout: it is replicated.
        """
        shape = ParamLayout.of(self.axes_of(name)).rank_shape(self.degree)
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        self._attach(name, sources, stride)

    def replace_parameters(self, plans: dict[str, AxisPlan], **tensors: Tensor) -> None:
        """Give the layer other plans (``plan_name -> plan``) and this rank's tensors for them, as ``pad_model`` does.

        Only what is named changes: ``layer.replace_parameters({"output_plan": plan}, weight=w, bias=b)``.
        """
        for name, plan in plans.items():
            setattr(self, name, plan)
        for name, tensor in tensors.items():
            old = getattr(self, name)
            self.register_parameter(name, nn.Parameter(tensor.to(old), requires_grad=old.requires_grad))
        self.plans_changed()
        for name in tensors:
            self._attach(name, None, getattr(self, "stride", 1))

    def _attach(self, name: str, sources: Any, stride: int) -> None:
        layout = ParamLayout.of(self.axes_of(name), sources)
        if layout.sharded:
            attach_layout(self, name, layout, degree=self.degree, stride=stride)

    def plans_changed(self) -> None:
        """Derive sizes and indices from the layer's plans."""

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        """The axes of a parameter by the layer's current plans."""
        raise NotImplementedError(f"{type(self).__name__} does not say how {name!r} is laid out")

    def init_parameter(self, name: str, fills: Fill | dict[str, Fill], keep_master: bool = False) -> Tensor | None:
        """Fill a parameter with its part of freshly drawn logical tensors (one ``Fill`` a source).

        Returns the master in at least float32 when asked to keep it. Does nothing on the meta device.
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
        keep_own_part(param, layout.rank_layout(self.degree, self.rank), masters)
        return next(iter(masters.values())) if keep_master else None

    def require_divisible(self, what: str, plan: AxisPlan) -> None:
        """Raise ShardingError when the axis does not divide and has not been padded."""
        fix = "build the layer (and the one it is paired with) with pad=True" if hasattr(self, "pad") else ""
        plan.require_exact(self.degree, f"{type(self).__name__}: {what}", fix)

    # --- index buffers: constants that every rank holds alike ------------------------------------------

    def use_index(self, name: str, index: Tensor | None) -> None:
        """Hold ``index`` (int64, or None) as a non-persistent buffer that survives ``to_empty``."""
        self._index_values[name] = index
        device = next((p.device for p in self._parameters.values() if p is not None and not p.is_meta), None)
        value = index if index is None or device is None else index.to(device)
        self.register_buffer(name, value, persistent=False)

    def gather_output_features(self, y: Tensor, plan: AxisPlan, index_name: str, dim: int = -1) -> Tensor:
        """Each rank's outputs -> all logical ones in order: filling dropped, replicas taken once."""
        y = mappings.gather_from_tensor_model_parallel_region_with_dim(y, dim, self.axis, context=self.context)
        index = getattr(self, index_name)
        if index is not None:
            return y.index_select(dim, index)
        return y.narrow(dim, 0, plan.size) if y.shape[dim] != plan.size else y

    def scatter_input_features(self, x: Tensor, plan: AxisPlan, index_name: str, dim: int = -1) -> Tensor:
        """All logical inputs -> this rank's: laid out by ``plan``, then cut evenly."""
        index = getattr(self, index_name)
        if index is not None:
            x = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1))], dim).index_select(dim, index)
        elif plan.padded_size(self.degree) != plan.size:
            x = F.pad(x, [0, 0] * (-dim - 1) + [0, plan.padded_size(self.degree) - plan.size])
        return mappings.scatter_to_tensor_model_parallel_region_with_dim(x, dim, self.axis, context=self.context)

    def gather_index_of(self, plan: AxisPlan) -> Tensor | None:
        """The index that :meth:`gather_output_features` needs; None when cutting the end off is enough."""
        if self._in_order(plan):
            return None
        with real_cpu_tensors():
            return plan.gather_index(self.degree)

    def scatter_index_of(self, plan: AxisPlan) -> Tensor | None:
        """The index that :meth:`scatter_input_features` needs; None when zeros at the end are enough."""
        if self._in_order(plan):
            return None
        with real_cpu_tensors():
            return plan.scatter_index(self.degree)

    def _in_order(self, plan: AxisPlan) -> bool:
        """Whether the gathered axis is the logical one, perhaps with filling at its end."""
        pieces = coalesce(piece for rank in range(self.degree) for piece in plan.runs(self.degree, rank))
        return not plan.sharded or pieces[:1] == (Run("", 0, plan.size),)

    # --- gradients of weights whose axis repeats elements or holds filling -------------------------------

    def elements_of(self, plan: AxisPlan) -> mappings.Elements | None:
        """What :meth:`logical` needs to know of an axis; None when each local element is one logical element."""
        repeated = plan.duplicated(self.degree)
        if not repeated and not any(isinstance(piece, Filling) for piece in plan.runs(self.degree, self.rank)):
            return None
        with real_cpu_tensors():
            return mappings.Elements(plan.rank_index(self.degree, self.rank), plan.size, repeated)

    def logical(self, param: Tensor, elements: mappings.Elements | None, dim: int = 0) -> Tensor:
        """``param`` itself; copies of an element share one gradient, and filling gets none."""
        return mappings.with_logical_gradient(param, elements, dim, self.axis, context=self.context)

    # --- the layout survives whatever replaces the parameters -------------------------------------------

    def _apply(self: Self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        restore_attributes(self)
        for name, index in self._index_values.items():
            buffer = getattr(self, name)
            if index is not None and not buffer.is_meta:
                buffer.copy_(index)  # to_empty() has just lost it
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        restore_attributes(self)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        restore_attributes(self)  # load_state_dict(assign=True) puts other parameters in
