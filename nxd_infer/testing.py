"""Check that training a model in parallel equals training it in one process of plain PyTorch.

::

    from nxd_infer.testing import assert_parallel_equivalent

    def test_my_model():
        assert_parallel_equivalent(build_my_model, {"input_ids": ids, "labels": ids}, tp=2, dp=2, zero1=True)

``model_fn()`` is called in this process without parallelism, and once in each of ``tp * pp * dp`` gloo processes. Both
sides train the same steps. Compared are the losses, the gradient norms, the gradients of the first step (every copy of
every element, on every rank) and the weights after the last step.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.context import LOCAL, current_context, use_context
from nxd_infer.errors import CollectiveTimeoutError, ParallelConfigError
from nxd_infer.layout import merge_state_dicts, shard_state_dict, weight_layout
from nxd_infer.trainer import (
    NxDModel,
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
    shutdown,
)
from nxd_infer.util.child_process import ChildProcess, end_all, wait_for_an_end
from nxd_infer.util.python_command import child_environment, preparation, python_of_caller
from nxd_infer.util.this_process import die_with_parent

__all__ = ["Training", "assert_parallel_equivalent", "compare_with", "train_single"]

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


def assert_parallel_equivalent(
    model_fn: Callable[[], nn.Module],
    batch: Batch,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    sequence_parallel: bool = False,
    zero1: bool = False,
    *,
    activation_checkpoint: Any = None,
    pad_model: bool = False,
    pipeline_config: Mapping[str, Any] | None = None,
    steps: int = 3,
    accumulate: int = 1,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_options: Mapping[str, Any] | None = None,
    max_grad_norm: float | None = 1.0,
    tolerance: float | None = None,
    seed: int = 0,
    timeout: float = 300,
) -> None:
    """Raise AssertionError, with the names and sizes of the differences, unless parallel training equals plain PyTorch.

    Args:
        model_fn: builds the model from parallel layers; a module-level function that new processes can import. The
            model returns its loss, a mean over the batch, so that parts of equal size can be averaged.
        batch: the whole batch, keyword or positional arguments of the model. Tensors are split along their first
            dimension over data-parallel ranks and accumulated passes.
        tp, pp, dp: degrees.
        sequence_parallel, zero1, activation_checkpoint, pad_model: options of ``neuronx_distributed_config``.
        pipeline_config: for ``pp`` above 1; default: stages of equal cost and ``pp`` microbatches.
        steps: number of optimizer steps to compare.
        optimizer_class, optimizer_options: the optimizer; default ``AdamW(lr=1e-3)``.
        max_grad_norm: clip to this norm on both sides; None does not clip.
        tolerance: for losses and norms (relative), and for each gradient (relative norm): default 1e-5, 1e-10 for
            models in float64. Weights after the last step may differ ten times as much: Adam divides small gradients.
        timeout: seconds after which the processes are killed and RuntimeError is raised.

    Raises ParallelConfigError for degrees and batches that do not fit, and RuntimeError with the rank's traceback if a
    rank fails or ends with a status other than 0.
    """
    training = Training(
        tp,
        dp,
        sequence_parallel,
        zero1,
        activation_checkpoint,
        pad_model,
        steps,
        accumulate,
        optimizer_class,
        optimizer_options or {"lr": 1e-3},
        max_grad_norm,
        seed,
        pp,
        pipeline_config,
    )
    if pp > 1 and accumulate > 1:
        raise ParallelConfigError(
            f"accumulate={accumulate}: a pipeline accumulates over its microbatches; leave it out, and pass "
            f'pipeline_config={{"auto_partition": True, "num_microbatches": {accumulate}}}'
        )
    pieces(batch, dp * accumulate)
    reference = train_single(model_fn, batch, training)
    found = _in_processes(model_fn, batch, training, reference, tolerance, timeout)
    if found:
        what = f"tp={tp}, pp={pp}, dp={dp}" + ", sequence parallel" * sequence_parallel + ", ZeRO-1" * zero1
        raise AssertionError(f"parallel training ({what}) is not plain PyTorch:\n" + "\n".join(found[:20]))


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
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
            optimizer.step()
            losses.append(float(loss.detach()))
        after = merge_state_dicts([{k: v.detach().clone() for k, v in model.state_dict().items()}], layouts)
        return Reference(losses, norms, first, after)


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
            found.append((how_much / allowed, f"{what} differs by {how_much:.3g}, allowed {allowed:.3g}"))

    for step in range(training.steps):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for part in mine:
            loss += _forward_and_backward(model, part, training).cpu()
        if not step:
            gradients = optimizer.named_gradients()
            whole = float(torch.stack([g.double().norm() for g in reference.gradients.values()]).norm())
            for name, wanted in _shards(model, reference.gradients).items():
                if name in gradients:
                    size = max(_logical_norm(model, name, reference.gradients), SMALL * whole)
                    gap = float((gradients[name].double().cpu() - wanted.double()).norm())
                    differ(f"the gradient of {name}", gap, size, limit)
        optimizer.step()
        mean = float(comm.all_reduce(loss, context, "dp")) / training.dp
        wanted = reference.losses[step]
        differ(f"the loss of step {step}", abs(mean - wanted), abs(wanted), limit)
        if optimizer.grad_norm is not None:
            norm = reference.norms[step]
            differ(f"the gradient norm of step {step}", abs(float(optimizer.grad_norm) - norm), norm, limit)
    for name, wanted in _shards(model, reference.weights).items():
        gap = float((model.state_dict()[name].double().cpu() - wanted.double()).norm())
        differ(f"{name} after {training.steps} steps", gap, max(float(wanted.double().norm()), 1e-6), 10 * limit)
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


# --- processes ----------------------------------------------------------------------------------------------


def _in_processes(
    model_fn: Callable[[], nn.Module],
    batch: Batch,
    training: Training,
    reference: Reference,
    tolerance: float | None,
    timeout: float,
) -> list[str]:
    """Run :func:`compare_with` on every rank; return each difference once, with the first rank that found it."""
    try:
        job = pickle.dumps((model_fn, batch, training, reference, tolerance))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ParallelConfigError(
            f"new processes cannot import {getattr(model_fn, '__qualname__', model_fn)!r}: pass a function defined at "
            f"the top level of a module, and tensors in the batch ({error})"
        ) from error
    world = training.tp * training.pp * training.dp
    if _importing:
        raise ParallelConfigError(
            "the script compares at its top level, and every rank imports the script: put the call under "
            "`if __name__ == '__main__':`"
        )
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="nxd-equivalence-") as folder:
        Path(folder, "job").write_bytes(pickle.dumps((preparation(), job, world, timeout, os.getpid())))
        ranks: list[ChildProcess] = []
        try:
            for rank in range(world):
                command = python_of_caller(_RANK, folder, str(rank))
                ranks.append(ChildProcess(command, environment=child_environment()))
            while running := [process for process in ranks if process.running]:
                if not wait_for_an_end(running, deadline - time.monotonic()):
                    break
                if any(process.returncode for process in ranks):
                    deadline = min(deadline, time.monotonic() + 5)  # the others wait for a lost peer
        finally:
            late = [rank for rank, process in enumerate(ranks) if process.running]
            end_all(ranks)
        answers = [Path(folder, f"{rank}.json") for rank in range(world)]
        answered = [json.loads(path.read_text()) if path.exists() else {} for path in answers]
        # Causes before consequences: first a rank's own error, then a rank that ended, then a rank that lost a peer.
        for rank, answer in enumerate(answered):
            if "error" in answer and not answer["lost a peer"]:
                raise RuntimeError(f"rank {rank} of {world} failed:\n{answer['error']}")
        for rank, (process, answer) in enumerate(zip(ranks, answered, strict=True)):
            if process.returncode and rank not in late and "error" not in answer:
                raise RuntimeError(f"rank {rank} of {world} {process.explain()}")
        for rank, answer in enumerate(answered):
            if "error" in answer:
                raise RuntimeError(f"rank {rank} of {world} failed:\n{answer['error']}")
        if late:
            raise RuntimeError(f"ranks {late} of {world} had not ended after {timeout} s and were killed")
    lines: dict[str, str] = {}
    for rank, answer in enumerate(answered):
        for line in answer["found"]:
            lines.setdefault(line, f"rank {rank}: {line}")
    return list(lines.values())


_RANK = "from nxd_infer.testing import _main; _main(sys.argv[1], int(sys.argv[2]))"
_importing = False
"""Whether this process is a rank that is importing the caller's script."""


def _main(folder: str, rank: int) -> None:
    """Run as rank ``rank`` of the job described in ``folder``."""
    global _importing
    wanted, job, world, timeout, parent = pickle.loads(Path(folder, "job").read_bytes())  # nosec B301  # of our parent
    die_with_parent(parent)
    _importing = True
    spawn.prepare(wanted)
    _importing = False
    _rank(job, folder, world, timeout, rank)


def _rank(job: bytes, folder: str, world: int, timeout: float, rank: int) -> None:
    torch.set_num_threads(1)
    answer: dict[str, Any] = {}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
        model_fn, batch, training, reference, tolerance = pickle.loads(job)  # nosec B301  # of our parent
        answer["found"] = compare_with(reference, model_fn, batch, training, tolerance)
        shutdown()
    except Exception as error:
        answer = {"error": traceback.format_exc(), "lost a peer": isinstance(error, CollectiveTimeoutError)}
    Path(folder, f"{rank}.json.new").write_text(json.dumps(answer))
    os.replace(f"{folder}/{rank}.json.new", f"{folder}/{rank}.json")
    if "error" in answer:
        os._exit(1)  # a normal exit would hang while peers wait in a collective
