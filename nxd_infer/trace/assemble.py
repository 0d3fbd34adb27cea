"""From the ranks' results to an artifact: compare them, compile each distinct graph once, write the files."""

from __future__ import annotations

import contextlib
import difflib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxd_infer import native
from nxd_infer.artifact.manifest import (
    BUCKET_KERNEL_REQUIREMENT,
    INLINE_WEIGHTS_REQUIREMENT,
    PACKED_REQUIREMENT,
    PIPELINE_REQUIREMENT,
    WHOLE_PROMPTS_REQUIREMENT,
    BucketSpec,
    GraphSpec,
    Manifest,
    WeightSpec,
    weight_schema_hash,
)
from nxd_infer.artifact.names import BUCKET_KERNEL_NAME, weight_name
from nxd_infer.artifact.rank_weights import file_entries
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.backends.base import Backend
from nxd_infer.backends.compile import cache as compile_cache
from nxd_infer.backends.compile.pool import compile_graphs
from nxd_infer.errors import TraceError
from nxd_infer.graph.stored import read_graph
from nxd_infer.layout.files.stream import write_safetensors
from nxd_infer.trace.ranks.files import CANONICAL_FILE, WEIGHTS_FILE
from nxd_infer.trace.request import TracedRank, rank_directory
from nxd_infer.util.machine import versions


@dataclass
class Compiled:
    """The distinct compiled graphs, by digest."""

    directories: dict[str, Path] = field(default_factory=dict)
    specs: dict[str, GraphSpec] = field(default_factory=dict)
    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0
    compiler: str = ""
    """The compiler of all of them, with its version; "" if nothing was compiled."""


def made_by(compiled: Compiled) -> dict[str, str]:
    """Return ``manifest.versions``: what made the artifact, so that its digest is another one for another compiler."""
    return {**versions(), **({"compiler": compiled.compiler} if compiled.compiler else {})}


def compare_ranks(
    ranks: list[TracedRank], build: Path, *, tp_degree: int, one_program: str, unpacked: Mapping[str, Any]
) -> None:
    """Check that the ranks of each pipeline stage are consistent. Raises TraceError naming the difference.

    ``one_program`` says what requires equal graphs; if it is "", graphs may differ, but not their collectives.
    ``unpacked``: the backend's options without which ranks may read a weight in different forms.
    """
    for stage in _by_stage(ranks, tp_degree):
        _compare_stage(stage, build, one_program, unpacked)


def _by_stage(ranks: list[TracedRank], tp_degree: int) -> list[list[TracedRank]]:
    return [ranks[first : first + tp_degree] for first in range(0, len(ranks), tp_degree)]


def _compare_stage(ranks: list[TracedRank], build: Path, one_program: str, unpacked: Mapping[str, Any]) -> None:
    first = ranks[0]
    for other in ranks[1:]:
        if [s.model_dump() for s in other.states] != [s.model_dump() for s in first.states]:
            mine, theirs = {s.name for s in first.states}, {s.name for s in other.states}
            differing = sorted(mine ^ theirs) or [
                a.name for a, b in zip(first.states, other.states, strict=True) if a != b
            ]
            raise TraceError(
                f"rank {other.rank} keeps other states than rank {first.rank} ({', '.join(differing[:4])}); states "
                "must have the same names and shapes on every rank"
            )
        for mine, theirs in zip(first.buckets, other.buckets, strict=True):
            names = [[spec.name for spec in bucket.outputs] for bucket in (mine, theirs)]
            handed = [[spec.model_dump() for spec in bucket.handed] for bucket in (mine, theirs)]
            shapes = [[spec.shape for spec in bucket.outputs] for bucket in (mine, theirs)]
            if names[0] != names[1] or shapes[0] != shapes[1] or handed[0] != handed[1]:
                raise TraceError(
                    f"bucket {mine.name!r} returns other outputs on rank {other.rank} than on rank {first.rank}"
                )
            if mine.graph.digest == theirs.graph.digest:
                continue
            if one_program:
                raise TraceError(
                    f"bucket {mine.name!r} traces to another graph on rank {other.rank} than on rank {first.rank}, "
                    f"which {one_program} forbids. The first difference:\n"
                    f"{_difference(build, first, other, mine.name)}\n"
                    "A rank must be data: use nxd_infer.comm.axis_rank or a buffer, not a Python number"
                )
            _compare_collectives(mine.name, other.rank, mine.graph.collectives, theirs.graph.collectives)
    table: dict[str, WeightSpec] = {}
    for rank in ranks:
        for spec in rank.weights:
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
    mine = first[place] if place < len(first) else "none"
    theirs = other[place] if place < len(other) else "none"
    raise TraceError(
        f"bucket {bucket!r}: the ranks would wait for one another for ever: collective {place} is {mine} on rank 0, "
        f"{theirs} on rank {rank} ({len(first)} and {len(other)} in all). Every rank must reach the same ones in "
        "the same order, and use their results (an unused collective is dropped)"
    )


def _difference(build: Path, first: TracedRank, other: TracedRank, bucket: str) -> str:
    texts = []
    for rank in (first, other):
        digest = next(b.graph.digest for b in rank.buckets if b.name == bucket)
        path = rank_directory(build, rank.rank) / "graphs" / digest / CANONICAL_FILE
        texts.append(path.read_text(encoding="utf-8").splitlines())
    lines = [line for line in difflib.unified_diff(*texts, lineterm="", n=0) if not line.startswith(("---", "+++"))]
    return "\n".join(line[:300] for line in lines[:4])


def compile_ranks(
    ranks: list[TracedRank],
    build: Path,
    backend: Backend,
    options: Mapping[str, Any],
    *,
    tp_degree: int,
    workdir: Path | None,
    workers: int | None,
    timeout: float,
    progress: Callable[[str, int, int, str], None],
) -> Compiled:
    """Compile each distinct graph once, or take it from the cache. Raises TraceError."""
    directories: dict[str, Path] = {}
    buckets: dict[str, str] = {}
    for rank in ranks:
        for bucket in rank.buckets:
            digest = bucket.graph.digest
            if digest not in directories:
                buckets[digest] = bucket.name
                directories[digest] = rank_directory(build, rank.rank) / "graphs" / digest
    result = compile_directories(
        directories, buckets, backend, options, workdir=workdir, workers=workers, timeout=timeout, progress=progress
    )
    for stage in _by_stage(ranks, tp_degree):
        for index, bucket in enumerate(stage[0].buckets):
            mine = result.specs[bucket.graph.digest].collectives
            for other in stage[1:]:
                theirs = result.specs[other.buckets[index].graph.digest].collectives
                _compare_collectives(bucket.name, other.rank, mine, theirs)
    return result


def compile_directories(
    directories: dict[str, Path],
    buckets: Mapping[str, str],
    backend: Backend,
    options: Mapping[str, Any],
    *,
    workdir: Path | None,
    workers: int | None,
    timeout: float,
    progress: Callable[[str, int, int, str], None],
) -> Compiled:
    """Compile graph directories by digest, or take them from the cache; ``buckets`` names them. Raises TraceError."""
    start = time.monotonic()
    result = Compiled(directories)
    total = len(directories)

    def keep() -> None:
        for digest, path in directories.items():
            if workdir is not None:
                _keep(path, backend.kept, workdir / f"{buckets[digest]}-{digest[:8]}")

    if backend.compiles:
        missing, result.compiler = [], backend.compiler()
        for digest, path in directories.items():
            if compile_cache.fetch(digest, path, result.compiler):
                result.cached += 1
                progress("compile graphs", result.cached, total, f"{buckets[digest]} (cached)")
            else:
                missing.append(path)
        if missing:
            names = ", ".join(buckets[path.name] for path in missing[: workers or 2])
            progress("compile graphs", result.cached, total, f"begins with {names}")

        def report(path: Path, seconds: float) -> None:
            result.compiled += 1
            (path / CANONICAL_FILE).unlink(missing_ok=True)
            compile_cache.store(path.name, path, result.compiler)
            progress(
                "compile graphs", result.cached + result.compiled, total, f"{buckets[path.name]} ({seconds:.1f} s)"
            )

        try:
            compile_graphs(
                backend.name,
                missing,
                options,
                tensors=max((_tensors(path) for path in missing), default=0),
                workdir=workdir,
                workers=workers,
                timeout=timeout,
                report=report,
            )
        except TraceError:
            with contextlib.suppress(TraceError):  # the compiler's own is the more important one
                keep()
            raise
    for digest, path in directories.items():
        result.specs[digest] = read_graph(path, digest).spec()
    keep()
    result.seconds = time.monotonic() - start
    return result


def _keep(graph: Path, names: Sequence[str], target: Path) -> None:
    """Copy what the backend's compiler took, and what it gave if it got so far, to the user's ``compiler_workdir``."""
    try:
        for name in [each for each in names if (graph / each).exists()]:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(graph / name, target / name)
    except OSError as error:
        raise TraceError(
            f"compiler_workdir: the files of the compiler cannot be copied to {target}: {error}; make room there, "
            "choose another directory, or leave it out"
        ) from error


def _tensors(directory: Path) -> int:
    graph = read_graph(directory)
    return len(graph.weights) + len(graph.states)


@dataclass
class Extras:
    """Contents of the artifact besides graphs and weights."""

    metadata: dict[str, Any]
    bucket_metadata: list[dict[str, Any]]
    files: dict[str, Path]
    kernel: Path | None
    inline_weights: bool
    tp_degree: int


def write_artifact(
    target: Path,
    ranks: list[TracedRank],
    build: Path,
    compiled: Compiled,
    backend: Backend,
    options: Mapping[str, Any],
    extras: Extras,
    progress: Callable[[str, int, int, str], None],
) -> Manifest:
    """Write the artifact directory with ArtifactWriter; files are linked from the build directory if possible."""
    weights = {spec.name: spec for rank in ranks for spec in rank.weights}
    stages = _by_stage(ranks, extras.tp_degree)
    manifest = Manifest(
        requires=[
            *([BUCKET_KERNEL_REQUIREMENT] if extras.kernel is not None else []),
            *([INLINE_WEIGHTS_REQUIREMENT] if extras.inline_weights else []),
            *([PACKED_REQUIREMENT] if any(spec.encoding for spec in weights.values()) else []),
            *([PIPELINE_REQUIREMENT] if len(stages) > 1 else []),
            *([WHOLE_PROMPTS_REQUIREMENT] if extras.metadata.get("encodes_prompts") else []),
        ],
        backend=backend.name,
        target=backend.target(options),
        versions=made_by(compiled),
        tp_degree=extras.tp_degree,
        pp_degree=len(stages),
        buckets=[
            BucketSpec(
                name=bucket.name,
                inputs=bucket.inputs,
                outputs=bucket.outputs,
                graphs=[rank.buckets[index].graph.digest for rank in ranks],
                stages=[spec for stage in stages if (spec := stage[0].buckets[index].stage) is not None],
                handed=bucket.handed,
                structure=bucket.structure,
                metadata=extras.bucket_metadata[index],
            )
            for index, bucket in enumerate(ranks[0].buckets)
        ],
        graphs={digest: compiled.specs[digest] for digest in sorted(compiled.specs)},
        states=[spec for stage in stages for spec in stage[0].states],
        weights=[weights[name] for name in sorted(weights)],
        weight_schema=weight_schema_hash(list(weights.values())),
        layout=_joined([stage[0].layout for stage in stages]),
        metadata=extras.metadata,
    )
    steps = len(ranks) + len(compiled.directories) + 1
    progress("write artifact", 0, steps, "")
    with ArtifactWriter(target) as writer:
        for number, (digest, path) in enumerate(sorted(compiled.directories.items())):
            graph = read_graph(path, digest)
            manifest.ops = sorted({*manifest.ops, *graph.ops})
            for file in sorted(p for p in path.rglob("*") if p.is_file() and p.name != CANONICAL_FILE):
                writer.add(f"graphs/{digest}/{file.relative_to(path).as_posix()}", file, link=True)
            progress("write artifact", number + 1, steps, "")
        for content_hash in manifest.ops:
            writer.add(f"ops/{content_hash}.so", library_path(content_hash))
        for rank in ranks:
            source = rank_directory(build, rank.rank) / WEIGHTS_FILE
            _add_missing(source, rank, manifest.of_rank(rank.rank).weights)
            writer.add(weight_name(rank.rank), source, link=True)
            progress("write artifact", len(compiled.directories) + rank.rank + 1, steps, "")
        if extras.kernel is not None:
            writer.add(BUCKET_KERNEL_NAME, extras.kernel)
        for name, source in extras.files.items():
            writer.add(name, source)
        writer.commit(manifest)
    progress("write artifact", steps, steps, "")
    return manifest


def _joined(layouts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the layouts of all stages as one."""
    found: dict[str, Any] = {}
    for layout in layouts:
        for kind, entries in layout.items():
            if kind != "unread":
                found.setdefault(kind, {}).update(entries)
    unread = set.intersection(*(set(layout["unread"]) for layout in layouts))  # each stage has the names of the others
    return {**found, "unread": sorted(unread)} if unread else found


def library_path(content_hash: str) -> Path:
    """Return the file of the native operators of that hash. Raises TraceError if this process has others."""
    library = native.load()
    if library.hash != content_hash:
        raise TraceError(f"the graphs call the operators {content_hash}, this process has {library.hash}")
    return Path(library.path)


def _add_missing(file: Path, rank: TracedRank, weights: list[WeightSpec]) -> None:
    """Complete a rank's file to all weights of its stage: those that only other ranks read are zeros."""
    own = {spec.name for spec in rank.weights}
    missing = [spec for spec in weights if spec.name not in own]
    if not missing:
        return
    import torch
    from safetensors import safe_open

    larger = file.with_suffix(".larger")
    with safe_open(file, framework="pt") as source, open(larger, "wb") as out:
        zeros = {spec.name: spec for spec in missing}
        present = [(name, one.dtype, one.shape) for name in sorted(source.keys()) for one in [source.get_tensor(name)]]

        def tensor(name: str) -> torch.Tensor:
            spec = zeros.get(name)
            return source.get_tensor(name) if spec is None else torch.zeros(spec.shape, dtype=spec.torch_dtype)

        write_safetensors(out, [*file_entries(missing), *present], tensor)
    shutil.move(larger, file)
