"""Train one model in plain PyTorch and in parallel, and describe what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.context import LOCAL, current_context, use_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import merge_state_dicts, shard_state_dict, weight_layout
from nxd_infer.parallel_layers.grads import pieces_of
from nxd_infer.trainer import (
    NxDModel,
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)
from nxd_infer.util.devices import transport_device

Batch = Mapping[str, Any] | Sequence[Any]
SMALL = 1e-2
"""A gradient below this fraction of the model's total is compared relative to the total: it may be rounding noise."""


@dataclass(frozen=True)
class Training:
    """What both sides train."""

    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    zero1: bool = False
    activation_checkpoint: Any = None
    pad_model: bool = False
    steps: int = 3
    accumulate: int = 1
    """Backward passes per step; each data-parallel rank's part of the batch is split into that many."""
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    max_grad_norm: float | None = 1.0
    seed: int = 0
    pp: int = 1
    pipeline: Mapping[str, Any] | None = None
    """``pipeline_config``; default: balanced stages, one microbatch a stage."""
    meta: bool = False
    """Build the parallel model on the meta device, and fill each module by its ``reset_parameters``."""
    ep: int = 1

    @property
    def pipeline_config(self) -> Mapping[str, Any]:
        return self.pipeline or {"auto_partition": True, "num_microbatches": self.pp}


@dataclass
class Reference:
    """Results of the single process. Gradients are from the first step, before clipping; both by logical name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    @property
    def tolerance(self) -> float:
        """1e-5, or 1e-10 for a model in float64."""
        return 1e-10 if all(w.dtype == torch.float64 for w in self.weights.values()) else 1e-5


# --- one process ------------------------------------------------------------------------------------------


def train_single(model_fn: Callable[[], nn.Module], batch: Batch, training: Training) -> Reference:
    """Train in this process, without parallelism and without this package's trainer."""
    with use_context(LOCAL):
        torch.manual_seed(training.seed)
        model = model_fn().train()
        optimizer = training.optimizer_class(model.parameters(), **training.optimizer_options)
        layouts = weight_layout(model)
        losses, norms, first = [], [], {}
        for step in range(training.steps):
            optimizer.zero_grad()
            loss = NxDModel(model, {})._loss(_call(model, batch))
            loss.backward()
            if not step:
                first = merge_state_dicts([_gradients(model)], layouts)
            limit = float("inf") if training.max_grad_norm is None else training.max_grad_norm
            norms.append(_clip(list(model.parameters()), limit))
            optimizer.step()
            losses.append(float(loss.detach()))
        after = merge_state_dicts([{k: v.detach().clone() for k, v in model.state_dict().items()}], layouts)
        return Reference(losses, norms, first, after)


def _clip(params: list[nn.Parameter], limit: float) -> float:
    """Clip as PyTorch does, by the norm of pieces: its own of a large parameter is wrong by 1e-4."""
    grads = [param.grad for param in params if param.grad is not None]
    norm = torch.nn.utils.get_total_norm([piece for grad in grads for piece in pieces_of(grad)])
    torch.nn.utils.clip_grads_with_norm_(params, limit, norm)
    return float(norm)


def _call(model: nn.Module, batch: Batch) -> Any:
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every entry of the state dict, zeros for buffers and parameters without a gradient."""
    tensors = model.state_dict(keep_vars=True)
    grads = {name: getattr(tensor, "grad", None) for name, tensor in tensors.items()}
    return {name: torch.zeros_like(tensors[name]) if g is None else g.detach().clone() for name, g in grads.items()}


def pieces(batch: Batch, count: int) -> list[Batch]:
    """Split the batch into ``count`` equal parts. Raises ParallelConfigError if a tensor does not divide."""

    def part(name: object, value: Any, i: int) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if value.shape[0] % count:
            raise ParallelConfigError(
                f"the batch's {name!r} has {value.shape[0]} rows, which do not divide into {count} equal parts"
            )
        return value.chunk(count)[i]

    if isinstance(batch, Mapping):
        return [{name: part(name, value, i) for name, value in batch.items()} for i in range(count)]
    return [[part(place, value, i) for place, value in enumerate(batch)] for i in range(count)]


# --- one of several ranks -----------------------------------------------------------------------------------


def compare_with(
    reference: Reference,
    model_fn: Callable[[], nn.Module],
    batch: Batch,
    training: Training,
    tolerance: float | None = None,
) -> list[str]:
    """Train on this rank of an existing process group, and describe what differs from ``reference``, worst first.

    Every rank must call this. Model parallelism must be uninitialised, or have the degrees of ``training``.
    """
    limit = reference.tolerance if tolerance is None else tolerance
    config = neuronx_distributed_config(
        tensor_parallel_size=training.tp,
        pipeline_parallel_size=training.pp,
        expert_parallel_size=training.ep,
        pipeline_config=training.pipeline_config if training.pp > 1 else None,
        model_init_config={"meta_device_init": training.meta},
        sequence_parallel=training.sequence_parallel,
        activation_checkpoint_config=training.activation_checkpoint,
        pad_model=training.pad_model,
        optimizer_config={
            "zero_one_enabled": training.zero1,
            "grad_clipping": training.max_grad_norm is not None,
            "max_grad_norm": training.max_grad_norm or 1.0,
            "bucket_cap_mb": 0.01,  # several buckets, however small the model
        },
    )
    torch.manual_seed(training.seed)
    model = initialize_parallel_model(config, model_fn)
    optimizer = initialize_parallel_optimizer(
        config, training.optimizer_class, model.parameters(), **training.optimizer_options
    )
    context = current_context()
    mine = pieces(batch, training.dp * training.accumulate)
    mine = mine[context.dp.rank * training.accumulate : (context.dp.rank + 1) * training.accumulate]
    found: list[tuple[float, str]] = []

    def differ(what: str, gap: float, size: float, allowed: float) -> None:
        how_much = gap / size if size else gap  # no relative difference to zeros
        if not how_much <= allowed:
            worse = how_much / allowed if allowed else how_much
            found.append((worse, f"{what} differs by {how_much:.3g}, allowed {allowed:.3g}"))

    for step in range(training.steps):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=transport_device())
        for part in mine:
            loss += _forward_and_backward(model, part, training).to(loss.device)
        if not step:
            gradients = optimizer.named_gradients()
            whole = float(torch.stack([g.double().norm() for g in reference.gradients.values()]).norm())
            for name, expected in _shards(model, reference.gradients).items():
                if name in gradients:
                    size = max(_logical_norm(model, name, reference.gradients), SMALL * whole)
                    gap = float((gradients[name].double().cpu() - expected.double()).norm())
                    differ(f"the gradient of {name}", gap, size, limit)
        optimizer.step()
        mean = float(comm.all_reduce(loss, context, "dp")) / training.dp
        expected = reference.losses[step]
        differ(f"the loss of step {step}", abs(mean - expected), abs(expected), limit)
        if optimizer.grad_norm is not None:
            norm = reference.norms[step]
            differ(f"the gradient norm of step {step}", abs(float(optimizer.grad_norm) - norm), norm, limit)
    for name, expected in _shards(model, reference.weights).items():
        gap = float((model.state_dict()[name].double().cpu() - expected.double()).norm())
        differ(f"{name} after {training.steps} steps", gap, max(float(expected.double().norm()), 1e-6), 10 * limit)
    return [text for _, text in sorted(found, reverse=True)]


def _forward_and_backward(model: NxDModel, part: Batch, training: Training) -> Tensor:
    """Add the gradients of a part of the batch; return its share of the loss."""
    if training.pp > 1:
        return model.run_train(**part) if isinstance(part, Mapping) else model.run_train(*part)
    output = model._loss(_call(model, part)) / training.accumulate
    output.backward()
    return output.detach()


def _shards(model: NxDModel, logical: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's shards of logical tensors, with zeros for padding."""
    tp = current_context().tp
    return shard_state_dict(model.local_module(), logical, tp.rank, tp.degree, strict=False)


def _logical_norm(model: NxDModel, name: str, logical: Mapping[str, Tensor]) -> float:
    """Return the norm of the logical tensors that make up the parameter ``name``."""
    names = weight_layout(model.local_module())[name].logical_names
    return float(torch.stack([logical[n].double().norm() for n in names if n in logical]).norm())
