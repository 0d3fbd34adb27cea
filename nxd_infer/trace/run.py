"""Run a trace from the ranks to the model, or say what it would do (its plan)."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer import native
from nxd_infer.backends.compile import footprint
from nxd_infer.backends.compile.pool import worker_count
from nxd_infer.graph.names import named_inputs
from nxd_infer.pipeline.partition import describe_partition
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.trace.assemble import Extras, compare_ranks, compile_ranks, write_artifact
from nxd_infer.trace.cuts import stage_cuts
from nxd_infer.trace.plan import PlannedBucket, PlannedStage, TracePlan, planned_inputs
from nxd_infer.trace.ranks.files import WEIGHTS_FILE
from nxd_infer.trace.ranks.from_checkpoint import Measured, measure, trace_ranks_here
from nxd_infer.trace.ranks.from_function import trace_ranks
from nxd_infer.trace.request import TraceRequest, rank_directory
from nxd_infer.util.memory import held_memory

if TYPE_CHECKING:
    from nxd_infer.trace.check import CheckedTrace

Report = Callable[[str, int, int, str], None]


def run(checked: CheckedTrace, build: Path, kernel: Path | None, progress: Report) -> TensorParallelModel:
    """Trace the ranks, compare and compile their graphs, write the artifact, wrap it."""
    start = time.monotonic()
    request = checked.request
    checked.backend.prepare_trace(request.tp_degree, request.options)
    if checked.loader is not None:
        ranks = trace_ranks_here(request, build, checked.loader, progress)
    else:
        ranks = trace_ranks(
            request,
            build,
            max_parallel=checked.options.max_parallel_compilations,
            timeout=checked.options.trace_timeout,
            progress=progress,
        )
    traced = time.monotonic()
    compare_ranks(
        ranks,
        build,
        tp_degree=request.tp_degree,
        one_program=_one_program(checked),
        unpacked=checked.backend.unpacked,
    )
    compiled = compile_ranks(
        ranks,
        build,
        checked.backend,
        request.options,
        tp_degree=request.tp_degree,
        workdir=checked.workdir,
        workers=checked.options.max_parallel_compilations,
        timeout=checked.options.compile_timeout,
        progress=progress,
    )
    if checked.serialization_path is not None:
        checked.serialization_path.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            source = rank_directory(build, rank.rank) / WEIGHTS_FILE
            shutil.copyfile(source, checked.serialization_path / f"tp{rank.rank}_sharded_checkpoint.safetensors")
    extras = Extras(
        metadata=checked.metadata,
        bucket_metadata=[bucket.metadata for bucket in request.buckets],
        files=checked.extra_files,
        kernel=kernel,
        inline_weights=checked.options.inline_weights_to_neff,
        tp_degree=request.tp_degree,
    )
    temporary = checked.artifact_dir is None
    holder = Path(tempfile.mkdtemp(prefix="nxd-artifact-")) if temporary else None
    target = checked.artifact_dir or Path(str(holder))
    try:
        write_artifact(target, ranks, build, compiled, checked.backend, request.options, extras, progress)
        artifact = load_artifact(
            target, verify=False, temporary=temporary, runs_here=not checked.backend.cross_compiles
        )
        model = TensorParallelModel(artifact)
    except BaseException:
        if holder is not None:
            shutil.rmtree(holder, ignore_errors=True)
        raise
    vars(model)["trace_report"] = {
        "graphs": len(compiled.directories),
        "compiled": compiled.compiled,
        "cached": compiled.cached,
        "ignored_compiler_args": checked.ignored_arguments,
        "trace_seconds": traced - start,
        "compile_seconds": compiled.seconds,
        "seconds": time.monotonic() - start,
        "rank_seconds": [rank.seconds for rank in ranks],
        "rank_peak_bytes": [rank.peak_bytes for rank in ranks],
        "weight_bytes": max(sum(spec.nbytes for spec in rank.weights) for rank in ranks),
        "state_bytes": max(sum(spec.nbytes for spec in rank.states) for rank in ranks),
    }
    return model


def _one_program(checked: CheckedTrace) -> str:
    """What wants the ranks' graphs to be equal; "" where nothing does."""
    if checked.options.spmd_mode:
        return "spmd_mode=True"
    return f"the {checked.backend.name} backend" if checked.backend.one_program else ""


def make_plan(checked: CheckedTrace) -> TracePlan:
    """See ``trace_plan``."""
    request = checked.request
    buckets = []
    sizes: dict[str, Any] = {}
    module = None
    if checked.loader is not None:
        measured = measure(request)
        module = measured.modules
        stages = _planned_stages(request, measured)
        sizes = {
            "weight_bytes": measured.weight_bytes,
            "state_bytes": measured.state_bytes,
            "stages": stages,
            "largest_tensor_bytes": measured.largest_tensor_bytes,
            "tensors": measured.tensors,
        }
    for bucket in request.buckets:
        if module is not None:
            named, _ = named_inputs(module[bucket.index], bucket.example, f"example_inputs of bucket {bucket.name!r}")
            shown = planned_inputs(list(named), list(named.values()))
        else:
            shown = _shapes(bucket.example)
        buckets.append(PlannedBucket(bucket.name, shown))
    compiles, workers = checked.backend.compiles, checked.options.max_parallel_compilations
    return TracePlan(
        tp_degree=request.tp_degree,
        pp_degree=request.pp_degree,
        backend=checked.backend.name,
        buckets=tuple(buckets),
        graphs=request.pp_degree * len(buckets) if compiles else 0,
        program_bytes=held_memory() or footprint.PROGRAM,
        builders=native.builders() if checked.backend.native else 0,
        compile_processes=worker_count(request.pp_degree * len(buckets), sizes.get("tensors", 0), workers)
        if compiles
        else 0,
        notes=_notes(checked),
        **sizes,
    )


def _planned_stages(request: TraceRequest, measured: Measured) -> tuple[PlannedStage, ...]:
    """Return the pipeline's stages; none without a pipeline."""
    if request.pp_degree == 1:
        return ()
    module = measured.modules[0]
    costs = describe_partition(module, stage_cuts(request, module))
    whole = sum(stage.cost for stage in costs) or 1.0
    return tuple(PlannedStage(stage.first, stage.last, stage.bytes, stage.cost / whole) for stage in costs)


def _notes(checked: CheckedTrace) -> tuple[str, ...]:
    found = []
    quantized = checked.options.quantize
    if quantized is not None:
        found.append(f"note: linear layers keep their weights in {quantized}: serving needs less than this")
    if checked.ignored_arguments:
        found.append(
            f"note: the {checked.backend.name} backend ignores what is for the Neuron compiler: "
            f"{' '.join(checked.ignored_arguments)}"
        )
    return tuple(found)


def _shapes(example: Any) -> tuple[str, ...]:
    from torch import Tensor
    from torch.utils import _pytree as pytree

    pairs = [
        (".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path), leaf)
        for path, leaf in pytree.tree_flatten_with_path(example)[0]
        if isinstance(leaf, Tensor)
    ]
    return planned_inputs([name for name, _ in pairs], [leaf for _, leaf in pairs])
