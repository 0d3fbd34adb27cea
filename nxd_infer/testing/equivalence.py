"""The check itself: :func:`assert_parallel_equivalent`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.testing.compare import Batch, Training, pieces, train_single
from nxd_infer.testing.ranks import compare_in_processes


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
    found = compare_in_processes(model_fn, batch, training, reference, tolerance, timeout)
    if found:
        what = f"tp={tp}, pp={pp}, dp={dp}" + ", sequence parallel" * sequence_parallel + ", ZeRO-1" * zero1
        raise AssertionError(f"parallel training ({what}) is not plain PyTorch:\n" + "\n".join(found[:20]))
