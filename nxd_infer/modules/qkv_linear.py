"""Query, key and value projections as one module; grouped key/value heads are replicated over ranks if needed.

Source: NxD Core training API, "GQA-QKV Linear Module".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan, ParamLayout, Run, gqa_plan
from nxd_infer.layout.shard import fill_tensor
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import (
    DeviceLike,
    ParallelLayer,
    device_of,
    init_linear_bias,
    init_linear_weight,
    logical_tensor,
    real_cpu_tensors,
)
from nxd_infer.util.also_called import also_called
from nxd_infer.util.options import whole_number

PARTS = ("q", "k", "v")


class GQAQKVColumnParallelLinear(ParallelLayer):
    """``q, k, v = module(x)``: three column-parallel projections of one input.

    Args:
        input_size: features of ``x``.
        output_size: ``[q_size, kv_size]``, or one int for both; also as ``output_sizes=``.
        bias, gather_output, sequence_parallel_enabled, dtype, device, init_method, sequence_dimension,
            tensor_model_parallel_group, reduce_dtype: as for ColumnParallelLinear. A bias is split like its weight.
        kv_size_multiplier: copies of every key/value head over all ranks, so that the degree may exceed their number;
            k and v are that many times wider, at every degree.
        fuse_qkv: one parameter ``weight_qkv`` (and ``bias_qkv``), a rank's rows of q, k and v in that order; else
            ``weight_q``, ``weight_k``, ``weight_v``. The logical tensors are the same three.
        head_dim: rows of one head. With it any degree works: heads are kept whole, padded and replicated as needed.
            Without it each rank takes equal pieces; see below for ``kv_size_multiplier``.
        logical_names: names of q, k and v in a checkpoint, as prefixes relative to this module, such as
            ``{"q": "../q_proj", "k": "../k_proj", "v": "../v_proj"}``.

    Copies of a head are adjacent (K0, K0, K1, K1), so the j-th key/value head of a rank serves its j-th run of query
    heads, as grouped-query attention expects. The copies are one weight: their gradients are summed. With
    ``gather_output`` k and v are ``kv_size * kv_size_multiplier`` wide, in the same order. The initial values are those
    of three ``nn.Linear`` created one after another.

    Without ``head_dim`` the module does not know which rows form a head. With ``gather_output`` the copies are then
    whole (K0, K1, K0, K1) at every degree. Otherwise, if the degree is a multiple of ``kv_size_multiplier``, a rank's
    rows count as one head, which is right if each rank has one key/value head. At that degree itself ranks hold a whole
    copy, at others pieces of whole copies, and the module warns. Attention over a rank's own heads gives the same
    result at every degree only with ``head_dim``.
    """

    @also_called(
        "self input_size output_size bias gather_output dtype device init_method sequence_parallel_enabled "
        "keep_master_weight kv_size_multiplier fuse_qkv reduce_dtype",
        when=lambda given: len(given) > 5 and isinstance(given[5], torch.dtype),
    )
    def __init__(
        self,
        input_size: int,
        output_size: int | Sequence[int] | None = None,
        bias: bool = True,
        gather_output: bool = True,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        *,
        output_sizes: int | Sequence[int] | None = None,
        init_method: Callable[[Tensor], object] | None = None,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        head_dim: int | None = None,
        logical_names: Mapping[str, str] | None = None,
        tensor_model_parallel_group: object = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ):
        super().__init__(tensor_model_parallel_group)
        if (output_size is None) == (output_sizes is None):
            raise ParallelConfigError("GQAQKVColumnParallelLinear takes either output_size or output_sizes")
        self.input_size = input_size
        self.q_size, self.kv_size = _sizes(output_size if output_sizes is None else output_sizes)
        self.output_sizes = [self.q_size, self.kv_size]
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.kv_size_multiplier = kv_size_multiplier
        self.fuse_qkv = fuse_qkv
        self.init_method = init_method
        self.keep_master_weight = keep_master_weight
        self.reduce_dtype = reduce_dtype
        self.use_bias = bias
        self.head_dim = head_dim
        self.names = dict(logical_names or {})
        if self.names and set(self.names) != set(PARTS):
            raise ParallelConfigError(f"logical_names must name q, k and v, got {sorted(self.names)}")
        self.q_plan, self.kv_plan = self._plans()
        self.plans_changed()
        device = device_of(device)
        kinds = ("weight", "bias") if bias else ("weight",)
        for kind in kinds:
            for name in self._parameter_names(kind):
                self.new_parameter(name, dtype, device, self._sources(name))
        self.reset_parameters()

    # --- layout ---------------------------------------------------------------------------------------

    def _plans(self) -> tuple[AxisPlan, AxisPlan]:
        d, m = self.head_dim, self.kv_size_multiplier
        whole_number("kv_size_multiplier", m, ParallelConfigError, 1)
        if d is None:
            return AxisPlan.even(self.q_size), AxisPlan.even(self.kv_size) if m == 1 else self._plan_without_heads()
        whole_number("head_dim", d, ParallelConfigError, 1)
        if self.q_size % d or self.kv_size % d:
            raise ParallelConfigError(
                f"output sizes {self.q_size} and {self.kv_size} are not whole heads of {d}; check head_dim"
            )
        plan = gqa_plan(self.q_size // d, self.kv_size // d, self.degree, kv_size_multiplier=m if m > 1 else 0)
        return plan.q_axis(d), plan.kv_axis(d)

    def _plan_without_heads(self) -> AxisPlan:
        """Plan copies of keys and values with unknown heads: of a rank's piece, or of all rows."""
        m = self.kv_size_multiplier
        if self.kv_size * m % self.degree:
            raise ParallelConfigError(
                f"{m} copies of kv_size={self.kv_size} do not divide over {self.degree} ranks; pass head_dim=, which "
                "makes every combination work"
            )
        pieces = self.degree // m if self.degree % m == 0 else 1
        if pieces == 1 and not self.gather_output:
            warnings.warn(
                f"kv_size_multiplier={m} at the degree {self.degree} without head_dim: a rank's keys and values are "
                "pieces of whole copies, or all heads, which may not belong to its queries; pass head_dim= for an "
                "attention that computes the same at every degree",
                stacklevel=4,
            )
        size = self.kv_size // pieces
        return AxisPlan.from_runs([Run("", i * size, (i + 1) * size) for i in range(pieces) for _ in range(m)])

    def _parameter_names(self, kind: str) -> list[str]:
        return [f"{kind}_qkv"] if self.fuse_qkv else [f"{kind}_{part}" for part in PARTS]

    def _plan(self, part: str) -> AxisPlan:
        return self.q_plan if part == "q" else self.kv_plan

    def _rows(self, parts: str) -> AxisPlan:
        if parts != "qkv":
            return self._plan(parts)
        return AxisPlan.fused({part: self._plan(part) for part in PARTS})

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        rows = self._rows(name.partition("_")[2])
        return (rows, self.input_size) if name.startswith("weight") else (rows,)

    def _sources(self, name: str) -> Mapping[str, str] | str | None:
        kind, _, parts = name.partition("_")
        logical = {part: self._logical(kind, part) for part in PARTS}
        return logical if parts == "qkv" else logical[parts]

    def _logical(self, kind: str, part: str) -> str:
        return f"{self.names[part]}.{kind}" if self.names else f"{kind}_{part}"

    def plans_changed(self) -> None:
        self.q_output_size_per_partition = self.q_plan.local_size(self.degree)
        self.kv_output_size_per_partition = self.kv_plan.local_size(self.degree)
        self.use_index("q_index", self.gather_index_of(self.q_plan) if self.gather_output else None)
        index = self.gather_index_of(self.kv_plan) if self.gather_output else None
        if self.gather_output and self.kv_size_multiplier > 1:
            with real_cpu_tensors():
                index = self.with_copies(torch.arange(self.kv_size) if index is None else index)
        self.use_index("kv_index", index)
        self.elements = {parts: self.elements_of(self._rows(parts)) for parts in (*PARTS, "qkv")}

    def with_copies(self, features: Tensor) -> Tensor:
        """Repeat key or value features ``[..., kv_size]`` for all copies, in the order of a gathered output."""
        m = self.kv_size_multiplier
        if self.head_dim is None:
            return torch.cat([features] * m, -1)
        return features.unflatten(-1, (-1, self.head_dim)).repeat_interleave(m, -2).flatten(-2)

    # --- values ---------------------------------------------------------------------------------------

    def initialize_weight_biases(self) -> None:
        """Fill the parameters again, as :meth:`reset_parameters` does."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the logical weights like three ``nn.Linear`` after the same seed: q, then k, then v."""
        first = getattr(self, self._parameter_names("weight")[0])
        if first.is_meta:
            return
        dtype = torch.promote_types(first.dtype, torch.float32) if self.keep_master_weight else first.dtype
        fills = {"weight": self.init_method or init_linear_weight, "bias": init_linear_bias(self.input_size)}
        masters: dict[str, dict[str, Tensor]] = {"weight": {}, "bias": {}} if self.use_bias else {"weight": {}}
        for part in PARTS:
            for kind, drawn in masters.items():
                shape = (self._plan(part).size, self.input_size)[: 2 if kind == "weight" else 1]
                drawn[self._logical(kind, part)] = logical_tensor(shape, dtype, first.device, fills[kind])
        for kind, drawn in masters.items():
            for name in self._parameter_names(kind):
                layout = ParamLayout.of(self.axes_of(name), self._sources(name))
                fill_tensor(getattr(self, name), drawn, layout.rank_layout(self.degree, self.rank))
        if self.keep_master_weight:
            self.master_weight = torch.cat(list(masters["weight"].values()))
            self.master_bias = torch.cat(list(masters["bias"].values())) if self.use_bias else None

    # --- computation ----------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map ``[..., input_size]`` to q, k, v, this rank's columns or all of them; see the class."""
        self.require_divisible("the query size", self.q_plan)
        self.require_divisible("the key/value size", self.kv_plan)
        here = {"process_group": self.axis, "context": self.context}
        if self.sequence_parallel_enabled:
            x = mappings.gather_from_sequence_parallel_region(
                x, self.sequence_dimension, reduce_dtype=self.reduce_dtype, **here
            )
        else:
            x = mappings.copy_to_tensor_model_parallel_region(x, reduce_dtype=self.reduce_dtype, **here)
        q_size, kv_size = self.q_output_size_per_partition, self.kv_output_size_per_partition
        if self.fuse_qkv:
            y = self._linear(x, "qkv")
            q, k, v = y.split([q_size, kv_size, kv_size], -1)
        else:
            q, k, v = (self._linear(x, part) for part in PARTS)
        if not self.gather_output:
            return q, k, v
        return (
            self.gather_output_features(q, self.q_plan, "q_index"),
            self.gather_output_features(k, self.kv_plan, "kv_index"),
            self.gather_output_features(v, self.kv_plan, "kv_index"),
        )

    def _linear(self, x: Tensor, parts: str) -> Tensor:
        weight, bias = self.get_parameter(f"weight_{parts}"), self._parameters.get(f"bias_{parts}")
        elements = self.elements[parts]
        return F.linear(x, self.logical(weight, elements), None if bias is None else self.logical(bias, elements))

    def extra_repr(self) -> str:
        return (
            f"input_size={self.input_size}, output_sizes={self.output_sizes}, bias={self.use_bias}, "
            f"kv_size_multiplier={self.kv_size_multiplier}, fuse_qkv={self.fuse_qkv}, {self.axis}={self.degree}"
        )


def _sizes(output_size: int | Sequence[int] | None) -> tuple[int, int]:
    sizes = [output_size, output_size] if isinstance(output_size, int) else list(output_size or ())
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ParallelConfigError(
            f"output_size must be [query size, key/value size] or one int for both, got {output_size!r}"
        )
    return sizes[0], sizes[1]
