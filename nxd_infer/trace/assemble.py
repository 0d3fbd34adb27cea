"""From the ranks' results to an artifact: compare them, compile each distinct graph once, write the files."""

from __future__ import annotations

import contextlib
import difflib
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_infer import native
from nxd_infer.artifact.manifest import (
    BUCKET_KERNEL_NAME,
    BUCKET_KERNEL_REQUIREMENT,
    INLINE_WEIGHTS_REQUIREMENT,
    PACKED_FILES_REQUIREMENT,
    PACKED_REQUIREMENT,
    PIPELINE_REQUIREMENT,
    WEIGHTS_LATER_REQUIREMENT,
    WHOLE_PROMPTS_REQUIREMENT,
    BucketSpec,
    Manifest,
    WeightSpec,
    weight_name,
    weight_schema_hash,
)
from nxd_infer.artifact.rank_weights import replace_weights
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.backends.base import Backend
from nxd_infer.backends.compile import cache as compile_cache
from nxd_infer.backends.compile.pool import compile_graphs
from nxd_infer.errors import TraceError
from nxd_infer.trace.options import RecompileOptions, TraceOptions
from nxd_infer.trace.ranks.traced import (
    CANONICAL_FILE,
    WEIGHTS_FILE,
    TracedRank,
    graph_directory,
    rank_directory,
)
from nxd_infer.trace.request import TraceRequest
from nxd_infer.util.machine import versions

# --- comparing ----------------------------------------------------------------------------------------


def compare_ranks(request: TraceRequest, ranks: list[TracedRank], build: Path) -> None:
    """Check that the ranks of each pipeline stage are consistent. Raises TraceError naming the difference.

    Graphs may differ unless the request or the backend forbids it, but not their collectives.
    """
    backend = request.backend
    one_program = f"the {backend.name} backend" if backend.one_program else ""
    if request.options.spmd_mode:
        one_program = "spmd_mode=True"
    for stage in _by_stage(request, ranks):
        for other in stage[1:]:
            _compare(stage[0], other, build, one_program)
        _compare_weights(stage, backend.unpacked)


def _by_stage(request: TraceRequest, ranks: list[TracedRank]) -> list[list[TracedRank]]:
    degree = request.options.tp_degree
    return [ranks[first : first + degree] for first in range(0, len(ranks), degree)]


def _compare(first: TracedRank, other: TracedRank, build: Path, one_program: str) -> None:
    if other.states != first.states:
        names = sorted(first.states.keys() ^ other.states.keys()) or [
            name for name, spec in first.states.items() if spec != other.states[name]
        ]
        raise TraceError(
            f"rank {other.rank} keeps other states than rank {first.rank} ({', '.join(names[:4])}); states "
            "must have the same names and shapes on every rank"
        )
    for a, b, graph_a, graph_b in zip(first.buckets, other.buckets, first.graphs, other.graphs, strict=True):
        outputs = [[(spec.name, spec.shape) for spec in bucket.outputs] for bucket in (a, b)]
        if outputs[0] != outputs[1] or a.handed != b.handed:
            raise TraceError(f"bucket {a.name!r} returns other outputs on rank {other.rank} than on rank {first.rank}")
        if graph_a.digest == graph_b.digest:
            continue
        if one_program:
            raise TraceError(
                f"bucket {a.name!r} traces to another graph on rank {other.rank} than on rank {first.rank}, "
                f"which {one_program} forbids. The first difference:\n"
                f"{_difference(build, (first.rank, graph_a.digest), (other.rank, graph_b.digest))}\n"
                "A rank must be data: use nxd_infer.comm.axis_rank or a buffer, not a Python number"
            )
        _compare_collectives(a.name, other.rank, graph_a.collectives, graph_b.collectives)


def _compare_weights(ranks: list[TracedRank], unpacked: Mapping[str, Any]) -> None:
    table: dict[str, WeightSpec] = {}
    for rank in ranks:
        for spec in rank.weights.values():
            known = table.setdefault(spec.name, spec)
            if (known.dtype, known.shape, known.stride) != (spec.dtype, spec.shape, spec.stride):
                raise TraceError(
                    f"the weight {spec.name!r} is {spec.dtype}{spec.shape} on rank {rank.rank} and "
                    f"{known.dtype}{known.shape} on an earlier one; pad it so that every rank holds the same shape"
                )
            if known.encoding != spec.encoding:
                raise TraceError(
                    f"rank {rank.rank} and an earlier one use the weight {spec.name!r} in different ways, so that only "
                    f"one can read it packed; trace with compiler_args={dict(unpacked)}"
                )


def _compare_collectives(bucket: str, rank: int, first: list[str], other: list[str]) -> None:
    if first == other:
        return
    place = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    expected, actual = ([*calls, "none"][min(place, len(calls))] for calls in (first, other))
    raise TraceError(
        f"bucket {bucket!r}: the ranks would wait for one another for ever: collective {place} is {expected} on rank "
        f"0, {actual} on rank {rank} ({len(first)} and {len(other)} in all). Every rank must reach the same ones in "
        "the same order, and use their results (an unused collective is dropped)"
    )


def _difference(build: Path, *graphs: tuple[int, str]) -> str:
    first, other = (
        (graph_directory(build, *graph) / CANONICAL_FILE).read_text(encoding="utf-8").splitlines() for graph in graphs
    )
    changes = difflib.unified_diff(first, other, lineterm="", n=0)
    lines = [line for line in changes if not line.startswith(("---", "+++"))]
    return "\n".join(line[:300] for line in lines[:4])


# --- compiling ----------------------------------------------------------------------------------------


def graph_directories(ranks: list[TracedRank], build: Path) -> dict[str, Path]:
    """Return the directory of each distinct graph, by digest."""
    directories: dict[str, Path] = {}
    for rank in ranks:
        for graph in rank.graphs:
            directories.setdefault(graph.digest, graph_directory(build, rank.rank, graph.digest))
    return directories


def compile_directories(
    directories: Mapping[str, Path],
    buckets: Iterable[BucketSpec],
    backend: Backend,
    backend_options: Mapping[str, Any],
    options: TraceOptions | RecompileOptions,
) -> dict[str, Any]:
    """Compile the ``buckets``' graphs, each in its directory by digest, or take them from the cache.

    Returns the number of ``graphs``, how many were ``compiled`` and ``cached``, the ``seconds``, and the ``compiler``
    with its version ("" if nothing is compiled). Raises TraceError.
    """
    start, total, progress = time.monotonic(), len(directories), options.report
    workdir = None if options.compiler_workdir is None else Path(options.compiler_workdir)
    names = {digest: bucket.name for bucket in buckets for digest in bucket.graphs}
    report: dict[str, Any] = {"graphs": total, "compiled": 0, "cached": 0, "compiler": ""}

    if backend.compiles:
        missing, compiler = [], backend.compiler()
        report["compiler"] = compiler
        for digest, path in directories.items():
            if compile_cache.fetch(digest, path, compiler):
                report["cached"] += 1
                progress("compile graphs", report["cached"], total, f"{names[digest]} (cached)")
            else:
                missing.append(path)
        if missing:
            first = ", ".join(names[path.name] for path in missing[: options.max_parallel_compilations or 2])
            progress("compile graphs", report["cached"], total, f"begins with {first}")

        def compiled(path: Path, seconds: float) -> None:
            report["compiled"] += 1
            (path / CANONICAL_FILE).unlink(missing_ok=True)
            compile_cache.store(path.name, path, compiler)
            done = report["cached"] + report["compiled"]
            progress("compile graphs", done, total, f"{names[path.name]} ({seconds:.1f} s)")

        try:
            compile_graphs(
                backend.name,
                missing,
                backend_options,
                workdir=workdir,
                workers=options.max_parallel_compilations,
                timeout=options.compile_timeout,
                report=compiled,
            )
        except TraceError:
            with contextlib.suppress(TraceError):  # the compiler's own is the more important one
                _keep(directories, names, backend, workdir)
            raise
    _keep(directories, names, backend, workdir)
    return {**report, "seconds": time.monotonic() - start}


def _keep(directories: Mapping[str, Path], names: Mapping[str, str], backend: Backend, workdir: Path | None) -> None:
    """Copy what was made of each graph, as far as the compiler got, to the user's ``compiler_workdir``."""
    if workdir is None:
        return
    target = workdir
    try:
        for digest, graph in directories.items():
            target = workdir / f"{names[digest]}-{digest[:8]}"
            for path in (path for path in sorted(graph.rglob("*")) if path.is_file() and path.name != CANONICAL_FILE):
                name = path.relative_to(graph)
                if not backend.kept or str(name) in backend.kept:
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target / name)
    except OSError as error:
        raise TraceError(
            f"compiler_workdir: the files of the compiler cannot be copied to {target}: {error}; make room there, "
            "choose another directory, or leave it out"
        ) from error


# --- writing ------------------------------------------------------------------------------------------


def made_by(compiler: str) -> dict[str, str]:
    """Return ``manifest.versions``: what made the artifact, so that its digest is another one for another compiler."""
    return {**versions(), **({"compiler": compiler} if compiler else {})}


def write_artifact(target: Path, request: TraceRequest, ranks: list[TracedRank], build: Path, compiler: str) -> None:
    """Write the artifact directory with ArtifactWriter; files are linked from the build directory if possible."""
    options, backend = request.options, request.backend
    progress = options.report
    metadata = dict(options.metadata or {})
    kernel = build / BUCKET_KERNEL_NAME
    weights = {spec.name: spec for rank in ranks for spec in rank.weights.values()}
    packed = [backend.encoded(weights[name]) for name in sorted(weights) if options.packed and weights[name].encoding]
    stages = _by_stage(request, ranks)
    graphs = {graph.digest: graph for rank in ranks for graph in rank.graphs}
    manifest = Manifest(
        requires=[
            *([BUCKET_KERNEL_REQUIREMENT] if kernel.exists() else []),
            *([INLINE_WEIGHTS_REQUIREMENT] if options.inline_weights_to_neff else []),
            *([PACKED_FILES_REQUIREMENT] if packed else []),
            *([PACKED_REQUIREMENT] if any(spec.encoding for spec in weights.values()) else []),
            *([PIPELINE_REQUIREMENT] if len(stages) > 1 else []),
            *([WEIGHTS_LATER_REQUIREMENT] if metadata.pop("weights_later", False) else []),
            *([WHOLE_PROMPTS_REQUIREMENT] if metadata.get("encodes_prompts") else []),
        ],
        backend=backend.name,
        target=backend.target(request.backend_options),
        versions=made_by(compiler),
        tp_degree=options.tp_degree,
        pp_degree=len(stages),
        buckets=[
            bucket.model_copy(
                update={
                    "graphs": [rank.graphs[index].digest for rank in ranks],
                    "stages": [spec for stage in stages for spec in stage[0].buckets[index].stages],
                }
            )
            for index, bucket in enumerate(ranks[0].buckets)
        ],
        graphs={digest: graphs[digest].spec() for digest in sorted(graphs)},
        states=[spec for stage in stages for spec in stage[0].states.values()],
        weights=[weights[name] for name in sorted(weights)],
        packed=packed,
        weight_schema=weight_schema_hash(list(weights.values())),
        layout=_joined([stage[0].layout for stage in stages]),
        ops=sorted({content_hash for graph in graphs.values() for content_hash in graph.ops}),
        metadata=metadata,
    )
    steps = len(ranks) + 1
    progress("write artifact", 0, steps, "")
    with ArtifactWriter(target) as writer:
        add_graphs(writer, graph_directories(ranks, build), manifest.ops)
        for done, rank in enumerate(ranks, 1):
            source = rank_directory(build, rank.rank) / WEIGHTS_FILE
            specs = manifest.of_rank(rank.rank).stored
            missing = [
                spec for spec in specs if spec.name not in rank.weights
            ]  # only other ranks of the stage read them
            if missing:
                zeros = {spec.name: torch.zeros((), dtype=spec.torch_dtype).expand(spec.shape) for spec in missing}
                replace_weights(source, larger := source.with_suffix(".larger"), zeros)
                larger.replace(source)
            writer.add(weight_name(rank.rank), source, link=True)
            progress("write artifact", done, steps, "")
        if kernel.exists():
            writer.add(BUCKET_KERNEL_NAME, kernel)
        for name, source in (options.extra_files or {}).items():
            if isinstance(source, bytes):
                writer.write_bytes(str(name), source)
            else:
                writer.add(str(name), source)
        writer.commit(manifest)
    progress("write artifact", steps, steps, "")


def add_graphs(writer: ArtifactWriter, directories: Mapping[str, Path], ops: Sequence[str]) -> None:
    """Add the files of graphs, by digest, and the operators that they call."""
    for digest, path in directories.items():
        for file in sorted(p for p in path.rglob("*") if p.is_file() and p.name != CANONICAL_FILE):
            writer.add(f"graphs/{digest}/{file.relative_to(path).as_posix()}", file, link=True)
    for content_hash in ops:
        library = native.load()
        if library.hash != content_hash:
            raise TraceError(f"the graphs call the operators {content_hash}, this process has {library.hash}")
        writer.add(f"ops/{content_hash}.so", library.path)


def _joined(layouts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the layouts of all stages as one."""
    joined: dict[str, Any] = {}
    for layout in layouts:
        for kind, entries in layout.items():
            if kind != "unread":
                joined.setdefault(kind, {}).update(entries)
    unread = set.intersection(*(set(layout["unread"]) for layout in layouts))  # each stage has the names of the others
    return {**joined, "unread": sorted(unread)} if unread else joined
