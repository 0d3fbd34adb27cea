"""ZeRO-1: each data-parallel rank steps an equal share of the elements and holds the optimizer state of no others.

Source: NxD Core training API, "Neuron Zero1 Optimizer".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.optimizer.parallel import NxDOptimizer, Parameters
from nxd_infer.optimizer.sharded_files import load_sharded, save_sharded

__all__ = ["NeuronZero1Optimizer"]

Groups = Sequence[Sequence[int]]


class NeuronZero1Optimizer(NxDOptimizer):
    """``NeuronZero1Optimizer(params, AdamW, lr=..., sharding_groups=..., grad_norm_groups=...)``.

    Args:
        params, optimizer_class: as for :class:`NxDOptimizer`.
        optimizer_dtype: float32 steps float32 masters of narrower parameters; None steps them in their own type.
        grad_clipping, max_norm: clip the gradients by the 2-norm of the whole model's; ``max_norm`` None is 1.
        sharding_groups: the data-parallel groups as lists of ranks, the only ones there are to share a state; default.
        grad_norm_groups: the tensor-parallel groups as lists of ranks, over which the norm is taken; default.
        use_grad_acc_hook: sum gradients of narrower parameters in float32 over backward passes.
        on_nonfinite, bucket_cap_mb: as for :class:`NxDOptimizer`.
        pin_layout, lazy_init, coalesce_cc: of the reference's transport; accepted without effect.
        defaults: handed to ``optimizer_class``.

    Every bucket is cut into equal shares, so a state is ``1 / dp`` of the whole plus at most one element a bucket.
    Raises ParallelConfigError for groups that are not those of ``parallel_state``.
    """

    def __init__(
        self,
        params: Parameters,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        optimizer_dtype: torch.dtype | None = torch.float32,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Groups | None = None,
        grad_norm_groups: Groups | None = None,
        lazy_init: bool = False,
        coalesce_cc: bool = False,
        use_grad_acc_hook: bool = False,
        on_nonfinite: str = "raise",
        bucket_cap_mb: float = 25.0,
        **defaults: Any,
    ):
        if optimizer_dtype not in (None, torch.float32):
            raise ParallelConfigError(f"optimizer_dtype must be torch.float32 or None, got {optimizer_dtype}")
        _require_groups("sharding_groups", sharding_groups, "dp")
        _require_groups("grad_norm_groups", grad_norm_groups, "tp")
        super().__init__(
            params,
            optimizer_class,
            zero1=True,
            grad_clipping=grad_clipping,
            max_grad_norm=1.0 if max_norm is None else max_norm,
            on_nonfinite=on_nonfinite,
            master_weights=optimizer_dtype is not None,
            fp32_grad_acc=use_grad_acc_hook,
            bucket_cap_mb=bucket_cap_mb,
            defaults=defaults,
        )

    def save_sharded_state_dict(
        self, output_dir: str | os.PathLike[str], save_serially: bool = True, *, num_workers_per_step: int = 8
    ) -> None:
        """Write this rank's state into ``output_dir``: safetensors and a JSON description. Every rank must call it.

        ``save_serially`` lets one data-parallel rank write at a time; else all write at once, ``num_workers_per_step``
        ranks at a time.
        """
        save_sharded(self, output_dir, at_a_time=1 if save_serially else num_workers_per_step)

    def load_sharded_state_dict(self, output_dir: str | os.PathLike[str], num_workers_per_step: int = 8) -> None:
        """Read back what :meth:`save_sharded_state_dict` wrote, ``num_workers_per_step`` ranks at a time.

        Raises CheckpointError when a file is missing or belongs to another model or to other degrees.
        """
        load_sharded(self, output_dir, at_a_time=num_workers_per_step)


def _require_groups(name: str, groups: Groups | None, axis: str) -> None:
    if groups is None:
        return
    layout = current_context().layout
    try:
        given: Any = sorted(sorted(int(rank) for rank in group) for group in groups)
    except (TypeError, ValueError):  # a process group, say
        given = groups
    if given == sorted(sorted(group) for group in layout.groups(axis)):
        return
    other = next((a for a in ("tp", "dp", "pp") if given == sorted(sorted(g) for g in layout.groups(a))), None)
    getter = {"tp": "get_tensor_model_parallel_group", "dp": "get_data_parallel_group"}[axis]
    raise ParallelConfigError(
        f"{name} must be the groups of axis {axis!r}, {layout.groups(axis)}, but they are {given}"
        + (f", the groups of axis {other!r}" if other else "")
        + f"; pass parallel_state.{getter}(as_list=True), or leave it out"
    )
