"""The check itself, in a process per rank, each with gloo: :func:`assert_parallel_equivalent`."""

from __future__ import annotations

import datetime
import json
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nxd_infer.errors import CollectiveTimeoutError, ParallelConfigError, RankFailedError, RankTimeoutError
from nxd_infer.processes import command
from nxd_infer.processes.command import import_script, preparation, python_of_caller
from nxd_infer.processes.own import die_with_parent
from nxd_infer.processes.ranks import run_ranks
from nxd_infer.testing.compare import Batch, Reference, Training, compare_with, pieces, train_single
from nxd_infer.trainer import shutdown


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
    ep: int = 1,
    timeout: float = 300,
) -> None:
    """Raise AssertionError, with the names and sizes of the differences, unless parallel training equals plain PyTorch.

    Args:
        model_fn: builds the model from parallel layers; a module-level function that new processes can import. The
            model returns its loss, a mean over the batch, so that parts of equal size can be averaged.
        batch: the whole batch, keyword or positional arguments of the model. Tensors are split along their first
            dimension over data-parallel ranks and accumulated passes.
        tp, pp, dp, ep: degrees.
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
        ep=ep,
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


def compare_in_processes(
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
    if command.importing_script:
        raise ParallelConfigError(
            "the script compares at its top level, and every rank imports the script: put the call under "
            "`if __name__ == '__main__':`"
        )
    failure = None
    with tempfile.TemporaryDirectory(prefix="nxd-equivalence-") as folder:
        Path(folder, "job").write_bytes(pickle.dumps((preparation(), job, timeout, os.getpid())))
        try:
            run_ranks(python_of_caller(_RANK, folder), world, None, timeout)
        except (RankFailedError, RankTimeoutError) as error:
            failure = error
        paths = [Path(folder, f"{rank}.json") for rank in range(world)]
        answers = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    if failure is not None:
        # The cause before its consequences: what a rank raised, before those that lost it as a peer.
        raised = [(answer["lost a peer"], rank) for rank, answer in enumerate(answers) if "error" in answer]
        lost, rank = min(raised, default=(True, 0))
        if not lost:
            raise RuntimeError(f"rank {rank} of {world} failed:\n{answers[rank]['error']}")
        raise RuntimeError(f"of {world} ranks, {failure}" + (f"\n{answers[rank]['error']}" if raised else ""))
    lines: dict[str, str] = {}
    for rank, answer in enumerate(answers):
        for line in answer["found"]:
            lines.setdefault(line, f"rank {rank}: {line}")
    return list(lines.values())


_RANK = "from nxd_infer.testing.equivalence import main; main(sys.argv[1])"


def main(folder: str) -> None:
    """Run a rank of the job described in ``folder``."""
    prepared, job, timeout, parent = pickle.loads(Path(folder, "job").read_bytes())  # nosec B301  # of our parent
    die_with_parent(parent)
    import_script(prepared)
    torch.set_num_threads(1)
    answer: dict[str, Any] = {}
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
        model_fn, batch, training, reference, tolerance = pickle.loads(job)  # nosec B301  # of our parent
        answer["found"] = compare_with(reference, model_fn, batch, training, tolerance)
        shutdown()
    except Exception as error:
        answer = {"error": traceback.format_exc(), "lost a peer": isinstance(error, CollectiveTimeoutError)}
    path = f"{folder}/{os.environ['RANK']}.json"
    Path(f"{path}.new").write_text(json.dumps(answer))
    os.replace(f"{path}.new", path)
    if "error" in answer:
        os._exit(1)  # a normal exit would hang while peers wait in a collective
