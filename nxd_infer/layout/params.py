"""ParamLayout: the layout of a sharded parameter, and the table of all layouts of a module.

A layer describes its parameter with :func:`attach_layout`. The layout is stored on the parameter
(``param.nxd_layout``, beside the reference's ``tensor_model_parallel``, ``expert_model_parallel``, ``partition_dim``,
``partition_stride`` and ``num_partitions``) and on its module, because deep copies and ``to_empty`` create new
parameters without attributes; :func:`restore_attributes` restores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.errors import ShardingError
from nxd_infer.layout.axis_plan import AxisPlan, Held
from nxd_infer.layout.runs import Run, TensorLayout

MODULE_TABLE = "_nxd_layouts"


@dataclass(frozen=True)
class ParamLayout:
    """How one parameter is built from logical tensors, at any degree.

    ``axes`` has one plan per dimension; ``sources`` maps the parts of the fused axis to logical names (``{"": name}``
    if nothing is fused; empty means the parameter's own name). Names in a module's table are relative to that module:
    ``"weight"`` is its own, ``"../q_proj.weight"`` a sibling's, ``"/lm_head.weight"`` starts at the root.
    :func:`weight_layout` resolves them.
    """

    axes: tuple[AxisPlan, ...]
    sources: tuple[tuple[str, str], ...] = ()
    alias_of: str | None = None
    """The first name of a tied parameter; a checkpoint may have either name."""

    def __post_init__(self) -> None:
        if len(self._fused()) > 1:
            raise ShardingError(f"only one axis may be fused, but axes {self._fused()} are")
        split = [dim for dim, plan in enumerate(self.axes) if plan.sharded]
        if len(split) > 1:
            raise ShardingError(
                f"one group of ranks cannot split two axes of a parameter, but axes {split} are sharded"
            )
        if self.sources and set(dict(self.sources)) != set(self.parts):
            raise ShardingError(f"the layout has parts {list(self.parts)} but sources for {list(dict(self.sources))}")

    @staticmethod
    def of(axes: Sequence[AxisPlan | int], sources: Mapping[str, str] | str | None = None) -> ParamLayout:
        """Create a layout from plans (a number is a replicated axis of that size) and a mapping or one name."""
        plans = tuple(AxisPlan.replicated(axis) if isinstance(axis, int) else axis for axis in axes)
        named = {"": sources} if isinstance(sources, str) else dict(sources or {})
        return ParamLayout(plans, tuple(named.items()))

    def _fused(self) -> list[int]:
        return [dim for dim, plan in enumerate(self.axes) if list(plan.parts) != [""]]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the fused axis, ``("",)`` if there is none."""
        return next((tuple(self.axes[dim].parts) for dim in self._fused()), ("",))

    @property
    def logical_names(self) -> tuple[str, ...]:
        """The logical tensors that make up the parameter; empty before names are resolved."""
        return tuple(dict.fromkeys(name for _, name in self.sources))

    @property
    def logical_shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of each logical tensor."""
        return {
            name: tuple(plan.parts.get(part, plan.size) if part else plan.size for plan in self.axes)
            for part, name in self.sources
        }

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different pieces."""
        return any(plan.sharded for plan in self.axes)

    @property
    def expert_dim(self) -> int:
        """The dimension of the experts if expert parallel ranks hold different ones, else -1."""
        return next((dim for dim, plan in enumerate(self.axes) if isinstance(plan, Held)), -1)

    def of_all_experts(self) -> ParamLayout:
        """Return the layout of the parameter with the experts of all expert parallel ranks."""
        axes = (AxisPlan.replicated(plan.size) if isinstance(plan, Held) else plan for plan in self.axes)
        return replace(self, axes=tuple(axes))

    @property
    def partition_dim(self) -> int:
        """The first sharded dimension, -1 if replicated (the reference's convention)."""
        return next((dim for dim, plan in enumerate(self.axes) if plan.sharded), -1)

    def exact(self, degree: int) -> bool:
        """Return whether every axis divides as planned; see :meth:`AxisPlan.exact`."""
        return all(plan.exact(degree) for plan in self.axes)

    def rank_shape(self, degree: int) -> tuple[int, ...]:
        """Return the shape of the parameter on every rank."""
        return tuple(plan.local_size(degree) for plan in self.axes)

    def rank_layout(self, degree: int, rank: int) -> TensorLayout:
        """Return the layout of the parameter on ``rank``."""
        names = dict(self.sources)
        axes = tuple(
            tuple(
                Run(names.get(piece.name, piece.name), piece.start, piece.stop)
                if isinstance(piece, Run) and piece.name
                else piece
                for piece in plan.runs(degree, rank)
            )
            for plan in self.axes
        )
        return TensorLayout(axes, names.get("", ""))

    def resolved(self, path: str, param_name: str) -> ParamLayout:
        """Return the layout with absolute names, for a module at ``path`` ("" is the root)."""
        if self.sources:
            return replace(self, sources=tuple((part, _absolute(path, name)) for part, name in self.sources))
        own = _join(path, param_name)
        return replace(self, sources=tuple((part, f"{own}.{part}" if part else own) for part in self.parts))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _absolute(path: str, name: str) -> str:
    if name.startswith("/"):
        return name[1:]
    while name.startswith("../"):
        if not path:
            raise ShardingError(f"the logical name {name!r} climbs above the root module")
        path, name = path.rpartition(".")[0], name[3:]
    return _join(path, name)


def attach_layout(
    module: nn.Module,
    param_name: str,
    axes: Sequence[AxisPlan | int] | ParamLayout,
    sources: Mapping[str, str] | str | None = None,
    *,
    degree: int = 1,
    stride: int = 1,
) -> ParamLayout:
    """Attach to ``module.<param_name>`` its layout for any degree, and its current degree.

    Sets ``nxd_layout``, ``tensor_model_parallel``, ``expert_model_parallel``, ``partition_dim``, ``partition_stride``
    and ``num_partitions`` on the parameter. Raises ShardingError if its shape differs from the layout's at ``degree``.
    """
    layout = axes if isinstance(axes, ParamLayout) else ParamLayout.of(axes, sources)
    param = getattr(module, param_name)
    if tuple(param.shape) != layout.rank_shape(degree):
        raise ShardingError(
            f"parameter {param_name!r} has the shape {tuple(param.shape)}, "
            f"but its layout gives a rank of {degree} the shape {layout.rank_shape(degree)}"
        )
    module.__dict__.setdefault(MODULE_TABLE, {})[param_name] = (layout, degree, stride)
    _set_attributes(param, layout, degree, stride)
    return layout


def _set_attributes(param: Tensor, layout: ParamLayout, degree: int, stride: int) -> None:
    attributes = {
        "nxd_layout": layout,
        "tensor_model_parallel": layout.sharded,
        "partition_dim": layout.partition_dim,
        "expert_model_parallel": layout.expert_dim >= 0,
        "partition_stride": stride,
        "num_partitions": degree,
    }
    for name, value in attributes.items():
        setattr(param, name, value)


def restore_attributes(module: nn.Module) -> None:
    """Restore the layout attributes on the parameters of ``module`` and its children, after they were replaced."""
    for child in module.modules():
        for name, (layout, degree, stride) in child.__dict__.get(MODULE_TABLE, {}).items():
            param = getattr(child, name, None)
            if isinstance(param, Tensor):
                _set_attributes(param, layout, degree, stride)


def layout_of(module: nn.Module, param_name: str) -> ParamLayout | None:
    """Return the layout of ``module.<param_name>`` with relative names, or None if it is replicated."""
    entry = module.__dict__.get(MODULE_TABLE, {}).get(param_name)
    return entry[0] if entry else getattr(getattr(module, param_name, None), "nxd_layout", None)


def layout_by_name(param: Tensor, name: str) -> ParamLayout:
    """Return the layout of a parameter, with absolute logical names."""
    layout: ParamLayout = getattr(param, "nxd_layout", None) or ParamLayout.of(list(param.shape))
    path, _, own = name.rpartition(".")
    return layout.resolved(path, own)


def attachment_of(module: nn.Module, param_name: str) -> tuple[int, int]:
    """Return the degree and the stride that :func:`attach_layout` got for ``module.<param_name>``."""
    _, degree, stride = module.__dict__[MODULE_TABLE][param_name]
    return degree, stride


def weight_layout(module: nn.Module) -> dict[str, ParamLayout]:
    """Return the layout of every parameter and persistent buffer by qualified name, with absolute logical names.

    Tensors without a layout are replicated. A tied parameter has an entry for each of its names; all but the first are
    ``alias_of`` the first and read its logical tensor.
    """
    out: dict[str, ParamLayout] = {}
    first: dict[int, str] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        persistent = [n for n in child._buffers if n not in child._non_persistent_buffers_set]
        for name in [*child._parameters, *persistent]:
            tensor = getattr(child, name)
            if tensor is None:
                continue
            key = _join(path, name)
            layout = layout_of(child, name) or ParamLayout.of(list(tensor.shape))
            layout = layout.resolved(path, name)
            if id(tensor) in first and isinstance(tensor, nn.Parameter):
                layout = replace(layout, alias_of=first[id(tensor)])
            else:
                first[id(tensor)] = key
            out[key] = layout
    return out


def move_model_to_device(model: nn.Module, device: torch.device | str, *, include_buffers: bool = True) -> nn.Module:
    """Move ``model`` in place and return it, keeping the attributes that parallel layers set on their parameters.

    With ``include_buffers=False`` buffers stay where they are.

    On some devices ``Module.to`` creates new parameters, untied and without the attributes (``tensor_model_parallel``,
    ``partition_dim``, ``nxd_layout``, ...); both are restored.
    """
    entries: dict[int, tuple[nn.Parameter, dict[str, Any], list[tuple[nn.Module, str]]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                entry = entries.setdefault(id(parameter), (parameter, dict(vars(parameter)), []))
                entry[2].append((module, name))
    buffers = [(module, dict(module._buffers)) for module in model.modules() if not include_buffers]
    model.to(device)
    for module, kept in buffers:
        module._buffers.update(kept)
    for _, attributes, places in entries.values():
        first, name = places[0]
        moved = first._parameters[name]
        for module, other in places[1:]:
            module._parameters[other] = moved
        for key, value in attributes.items():
            setattr(moved, key, value)
    return model
