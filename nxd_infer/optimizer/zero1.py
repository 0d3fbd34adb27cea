"""ZeRO-1: each data-parallel rank updates an equal share of the elements and holds only their optimizer state.

Source: NxD Core training API, "Neuron Zero1 Optimizer"; torch-xla 2.9, ``ZeroRedundancyOptimizer``.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.optimizer.groups import checked_norm, require_supported
from nxd_infer.optimizer.parallel import NxDOptimizer, Parameters
from nxd_infer.optimizer.sharded_files import load_sharded, save_sharded

__all__ = ["NeuronZero1Optimizer"]

Groups = Sequence[Sequence[int]]
OPTIMIZER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class NeuronZero1Optimizer(NxDOptimizer):
    """``NeuronZero1Optimizer(params, AdamW, lr=..., sharding_groups=..., grad_norm_groups=...)``.

    The arguments are those of torch-xla's ``ZeroRedundancyOptimizer``, in the same order.

    Args:
        params, optimizer_class: as for :class:`NxDOptimizer`.
        optimizer_dtype: the dtype of the updated parameter copies and of the optimizer's state: float16, bfloat16,
            float32 or float64. None is float32, or float64 for float64 parameters.
        grad_clipping, max_norm: clip the gradients by the 2-norm of the whole model's; ``max_norm`` None is 1.
        sharding_groups: must be the data-parallel groups as lists of ranks, which share a state; the default.
        grad_norm_groups: must be the tensor-parallel groups as lists of ranks, for the norm; the default.
        lazy_init: shard nothing before :meth:`init_zero`, for example to move the model or call
            ``initialize_model_parallel`` first.
        bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter: parameters and gradients use the same flat buckets, no
            larger than either; 0 leaves the size to ``bucket_cap_mb``.
        use_grad_acc_hook: sum gradients over backward passes in ``optimizer_dtype``, at least float32.
        save_master_weights: no effect; a state always has the updated copies, so training resumes bit-exactly.
        higher_cc_precision: sum gradients over the ranks in ``optimizer_dtype``; otherwise in at least float32.
        pin_layout, coalesce_cc: options of XLA's transport; accepted without effect.
        master_weights: False updates every parameter in its own dtype and memory.
        on_nonfinite, bucket_cap_mb: as for :class:`NxDOptimizer`.
        defaults: passed to ``optimizer_class``.

    Every bucket is split into equal shares, so a state is ``1 / dp`` of the total plus at most one element per bucket.
    ``base_optimizer`` is the wrapped optimizer. Raises ParallelConfigError for groups that are not those of
    ``parallel_state``, and for arguments out of range.
    """

    def __init__(
        self,
        params: Parameters,
        optimizer_class: type[torch.optim.Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Groups | None = None,
        grad_norm_groups: Groups | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: float = 0,
        bucket_cap_mb_reduce_scatter: float = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        *,
        coalesce_cc: bool = False,
        master_weights: bool = True,
        on_nonfinite: str = "raise",
        bucket_cap_mb: float = 25.0,
        **defaults: Any,
    ):
        if optimizer_dtype not in (None, *OPTIMIZER_DTYPES):
            known = ", ".join(map(str, OPTIMIZER_DTYPES))
            raise ParallelConfigError(f"optimizer_dtype must be one of {known}, or None; got {optimizer_dtype!r}")
        caps = {
            "bucket_cap_mb_all_gather": bucket_cap_mb_all_gather,
            "bucket_cap_mb_reduce_scatter": bucket_cap_mb_reduce_scatter,
        }
        for name, cap in caps.items():
            if isinstance(cap, bool) or not isinstance(cap, int | float) or not cap >= 0:
                raise ParallelConfigError(f"{name} must be a number of megabytes, or 0 for the default; got {cap!r}")
        self.optimizer_dtype = optimizer_dtype or torch.float32
        self._sharding_groups, self.grad_norm_groups = sharding_groups, grad_norm_groups
        self.pin_layout, self.coalesce_cc = pin_layout, coalesce_cc
        self.bucket_cap_mb_all_gather = bucket_cap_mb_all_gather
        self.bucket_cap_mb_reduce_scatter = bucket_cap_mb_reduce_scatter
        self.use_grad_acc_hook, self.higher_cc_precision = use_grad_acc_hook, higher_cc_precision
        self.save_master_weights = save_master_weights
        super().__init__(
            params,
            optimizer_class,
            zero1=True,
            grad_clipping=grad_clipping,
            max_grad_norm=_norm(max_norm),
            on_nonfinite=on_nonfinite,
            master_weights=master_weights and (optimizer_dtype or True),
            fp32_grad_acc=use_grad_acc_hook,
            reduce_dtype=self.optimizer_dtype if higher_cc_precision else torch.float32,
            bucket_cap_mb=min([cap for cap in caps.values() if cap], default=bucket_cap_mb),
            lazy_init=lazy_init,
            defaults=defaults,
        )

    def init_zero(self) -> None:
        """Shard the current parameters and create ``base_optimizer``. A second call creates a new one without state.

        Raises ParallelConfigError for ``sharding_groups`` and ``grad_norm_groups`` of other axes.
        """
        require_supported(self.optimizer_class, True, current_context())  # first: no groups fit a rejected axis
        _require_groups("sharding_groups", self._sharding_groups, "dp")
        _require_groups("grad_norm_groups", self.grad_norm_groups, "tp")
        super().init_zero()

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, over this rank's shards. Raises AttributeError before :meth:`init_zero`."""
        return self.optimizer

    @property
    def sharding_groups(self) -> Groups:
        """The groups of ranks that share a state. Can be set before :meth:`init_zero`."""
        return current_context().layout.groups("dp") if self._sharding_groups is None else self._sharding_groups

    @sharding_groups.setter
    def sharding_groups(self, groups: Groups) -> None:
        if self.inited:
            raise ParallelConfigError("sharding_groups: the parameters are already sharded; set it before init_zero()")
        self._sharding_groups = groups

    @property
    def max_norm(self) -> float:
        """The norm that gradients are clipped to; None is 1. Raises ParallelConfigError unless it is above 0."""
        return self.max_grad_norm

    @max_norm.setter
    def max_norm(self, norm: float | None) -> None:
        self.max_grad_norm = _norm(norm)

    @property
    def global_rank(self) -> int:
        """This rank among all."""
        return current_context().rank

    @property
    def global_world_size(self) -> int:
        """The number of all ranks."""
        return current_context().world_size

    @property
    def local_rank(self) -> int:
        """This rank among those of its sharding group."""
        return current_context().dp.rank

    @property
    def local_world_size(self) -> int:
        """The number of ranks that share a state."""
        return current_context().dp.degree

    @property
    def coalesce_cc_all_gather(self) -> bool:
        """Whether parameters are gathered several at a time: always, in flat buckets."""
        return True

    coalesce_cc_reduce_scatter = coalesce_cc_all_gather

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, which the reference's name ``"base_state"`` reads, too."""
        return ZeroState(super().state_dict())

    def allgather_weights_and_update_full_parameter(self, sharding_scheme: None = None) -> None:
        """Write ``base_optimizer``'s current tensors to the parameters of all ranks. A collective."""
        if sharding_scheme is not None:
            raise ParallelConfigError("sharding_scheme is always the data-parallel groups, in one step: leave it out")
        self.require_inited("allgather_weights_and_update_full_parameter()")
        self.publish()

    def get_shape_info(self) -> dict[int, torch.Size]:
        """Return the shape of each parameter, by its index in ``param_groups``."""
        params = [param for group in self.param_groups for param in group["params"]]
        return {place: param.shape for place, param in enumerate(params)}

    def save_sharded_state_dict(
        self, output_dir: str | os.PathLike[str], save_serially: bool = True, *, num_workers_per_step: int = 8
    ) -> None:
        """Write this rank's state into ``output_dir``: safetensors and a JSON description. Every rank must call it.

        With ``save_serially`` one data-parallel rank writes at a time, otherwise ``num_workers_per_step`` ranks.
        """
        save_sharded(self, output_dir, at_a_time=1 if save_serially else num_workers_per_step)

    def load_sharded_state_dict(self, output_dir: str | os.PathLike[str], num_workers_per_step: int = 8) -> None:
        """Load the files of :meth:`save_sharded_state_dict`, ``num_workers_per_step`` ranks at a time.

        Raises CheckpointError if a file is missing or belongs to another model or to other degrees.
        """
        self.require_inited("load_sharded_state_dict()")
        load_sharded(self, output_dir, at_a_time=num_workers_per_step)


class ZeroState(dict[str, Any]):
    """A state whose ``"state"`` can also be read as ``"base_state"``."""

    def __missing__(self, key: str) -> Any:
        if key == "base_state":
            return self["state"]
        raise KeyError(key)

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # what torch.load() takes with weights_only=True


def _norm(norm: float | None) -> float:
    return checked_norm("max_norm", 1.0 if norm is None else norm)


def _require_groups(name: str, groups: Groups | None, axis: str) -> None:
    if groups is None:
        return
    layout = current_context().layout
    try:
        ranks: Any = sorted(sorted(int(rank) for rank in group) for group in groups)
    except (TypeError, ValueError):  # a process group, say
        ranks = groups
    if ranks == sorted(sorted(group) for group in layout.groups(axis)):
        return
    other = next((a for a in ("tp", "dp", "pp") if ranks == sorted(sorted(g) for g in layout.groups(a))), None)
    getter = {"tp": "get_tensor_model_parallel_group", "dp": "get_data_parallel_group"}[axis]
    raise ParallelConfigError(
        f"{name} must be the groups of axis {axis!r}, {layout.groups(axis)}, but they are {ranks}"
        + (f", the groups of axis {other!r}" if other else "")
        + f"; pass parallel_state.{getter}(as_list=True), or leave it out"
    )
