"""Compile a saved model again, for another machine or backend, from the canonical graphs in the artifact.

Neither the model's code nor its checkpoint is needed: the weight files are reused as they are, and the backend
processes the stored graphs as after a trace. An artifact of format 1.0 stores its graphs as the CPU's passes left them,
so these are compiled unchanged.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxd_infer.artifact.manifest import FORMAT, PACKED_REQUIREMENT
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.backends import registry
from nxd_infer.backends.base import Backend, Quantization
from nxd_infer.backends.compile.pool import make_workdir
from nxd_infer.backends.compiler_args import arguments_of
from nxd_infer.backends.quantization import check_encodings, check_quantize, quantization_of
from nxd_infer.errors import ArtifactVersionError, BackendUnavailableError, TraceError
from nxd_infer.graph.canonical import canonical_text, configuration, digest_of, name_lowered, stored_graph
from nxd_infer.graph.ir import FUNCTIONAL
from nxd_infer.graph.stored import GRAPH_FILE, IR_FILE, read_graph, read_ir, write_graph
from nxd_infer.runtime.load import load_artifact
from nxd_infer.trace.assemble import compile_directories, library_path, made_by
from nxd_infer.trace.check import require_stages, tracing_backend
from nxd_infer.trace.options import RecompileOptions
from nxd_infer.trace.ranks.files import CANONICAL_FILE
from nxd_infer.util.machine import architecture
from nxd_infer.util.options import accepts_options
from nxd_infer.util.progress import silent
from nxd_infer.util.temporary import temporary_name

__all__ = ["parallel_model_recompile"]


@accepts_options(RecompileOptions)
def parallel_model_recompile(given: RecompileOptions) -> dict[str, Any]:
    """Write an artifact with its graphs compiled again; weights and the rest stay.

    The options that were used for tracing are not remembered.

    Args:
        {arguments}

    Returns:
        ``{"graphs", "compiled", "cached", "ignored_compiler_args", "seconds"}``.

    Raises:
        ArtifactError, ArtifactCorruptError, ArtifactVersionError: as ``load_artifact``.
        TraceConfigError: invalid arguments of the backend. BackendUnavailableError: it cannot compile here, or the
            graphs call operators that cannot be compiled for it. TraceError: compiling failed.
    """
    report = given.progress or silent
    ArtifactWriter(given.save_dir, replace=given.replace).check_target()
    source = load_artifact(given.load_dir, runs_here=False)
    found = tracing_backend(given.backend or source.manifest.backend)
    require_stages(found, source.manifest.pp_degree)
    own, ignored = arguments_of(given.compiler_args, found, given.target)
    form = _quantization(source)
    quantize = None if form is None else form.name
    check_quantize(found, quantize)
    options = found.options(own, quantize)
    workdir = Path(given.compiler_workdir) if given.compiler_workdir is not None else None
    make_workdir(workdir)
    build = temporary_name("nxd-recompile-")
    try:
        build.mkdir(mode=0o700)
        canonical = all(read_ir(source.graph_dir(digest))["ir"] == FUNCTIONAL for digest in source.manifest.graphs)
        made = _lower(source, found, options, form, build) if canonical else _take_over(source, found, options, build)
        compiled = compile_directories(
            made.directories,
            {made.renamed[old]: bucket.name for bucket in source.manifest.buckets for old in bucket.graphs},
            found,
            options,
            workdir=workdir,
            workers=given.max_parallel_compilations,
            timeout=given.compile_timeout,
            progress=report,
        )
        manifest = source.manifest.model_copy(deep=True)
        manifest.format = FORMAT if canonical else manifest.format
        manifest.backend, manifest.target, manifest.versions = found.name, found.target(options), made_by(compiled)
        manifest.graphs = {digest: compiled.specs[digest] for digest in sorted(compiled.specs)}
        manifest.ops = sorted(made.libraries)
        for weight in manifest.weights:
            weight.encoding = made.encodings.get(weight.name, "")
        packed = [PACKED_REQUIREMENT] if any(made.encodings.values()) else []
        manifest.requires = [*(name for name in manifest.requires if name != PACKED_REQUIREMENT), *packed]
        for bucket in manifest.buckets:
            bucket.graphs = [made.renamed[old] for old in bucket.graphs]
        report("write artifact", 0, 1, "")
        with ArtifactWriter(given.save_dir, replace=given.replace) as writer:
            for name, spec in source.manifest.files.items():
                if not name.startswith(("graphs/", "ops/")):
                    writer.add(name, source.path / name, known=spec)
            for content_hash, library in made.libraries.items():
                writer.add(f"ops/{content_hash}.so", library)
            for digest, directory in made.directories.items():
                for file in sorted(path for path in directory.rglob("*") if path.is_file()):
                    if file.name != CANONICAL_FILE:
                        writer.add(f"graphs/{digest}/{file.relative_to(directory).as_posix()}", file)
            writer.commit(manifest)
        report("write artifact", 1, 1, "")
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return {
        "graphs": len(made.directories),
        "compiled": compiled.compiled,
        "cached": compiled.cached,
        "ignored_compiler_args": ignored,
        "seconds": compiled.seconds,
    }


@dataclass
class _Made:
    """Graphs to be compiled."""

    directories: dict[str, Path] = field(default_factory=dict)
    """Graphs by digest."""
    renamed: dict[str, str] = field(default_factory=dict)
    """The digest in the artifact -> the new one."""
    libraries: dict[str, Path] = field(default_factory=dict)
    """Operator libraries that the graphs call, by content hash."""
    encodings: dict[str, str] = field(default_factory=dict)
    """The encodings in which graphs read their weights."""


def _quantization(source: LoadedArtifact) -> Quantization | None:
    """Return the form of its rounded weights, if it has any."""
    if not any(weight.encoding for weight in source.manifest.weights):
        return None
    backend = registry.get(source.manifest.backend)
    check_encodings(source.path, source.manifest, backend)
    return quantization_of(source.manifest, backend)


def _lower(
    source: LoadedArtifact, backend: Backend, options: dict[str, Any], form: Quantization | None, build: Path
) -> _Made:
    """Lower the canonical graphs with ``backend``, below ``build``."""
    backend.prepare_trace(source.manifest.tp_degree, options)
    made = _Made()
    ranks = dict.fromkeys(zip(*(bucket.graphs for bucket in source.manifest.buckets), strict=True))
    if backend.one_program and len(ranks) > 1:
        raise TraceError(
            f"the ranks of {source.path} have {len(ranks)} graphs, and the {backend.name} backend runs one on "
            "all of them: write the model so that a rank is data (nxd_infer.comm.axis_rank) and trace it again"
        )
    for digests in ranks:  # ranks with equal graphs are lowered once
        rounded = () if form is None else (form.encoding,)
        graphs = [stored_graph(source.graph_dir(digest), rounded) for digest in digests]
        for old, graph, lowered in zip(digests, graphs, backend.passes(graphs, options), strict=True):
            ir = graph.ir()
            name_lowered(lowered, ir, configuration(backend.name, options))
            if made.renamed.setdefault(old, lowered.digest) != lowered.digest:
                raise TraceError(
                    f"the ranks of {source.path} share graph {old} and would need it in two forms: trace it again"
                )
            directory = made.directories[lowered.digest] = build / "graphs" / lowered.digest
            write_graph(ir, lowered, directory)
            made.libraries.update((digest, library_path(digest)) for digest in lowered.graph.ops)
            made.encodings.update((weight.name, weight.encoding) for weight in lowered.graph.weights)
    return made


def _take_over(source: LoadedArtifact, backend: Backend, options: dict[str, Any], build: Path) -> _Made:
    """Take the graphs of an artifact of format 1.0 unchanged: only a backend with their operators can run them."""
    made = _Made(encodings={weight.name: weight.encoding for weight in source.manifest.weights})
    for old in source.manifest.graphs:
        graph, ir = read_graph(source.graph_dir(old), old), read_ir(source.graph_dir(old))
        text = canonical_text(ir, graph, configuration(backend.name, options), {})
        _check_operators(source, backend, text)
        for content_hash in graph.ops:
            target = build / "ops" / f"{content_hash}.so"
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source.op_file(content_hash), target)
            made.libraries[content_hash] = target
        graph.digest = made.renamed[old] = digest_of(text)
        made.directories[graph.digest] = directory = build / "graphs" / graph.digest
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.graph_dir(old) / IR_FILE, directory / IR_FILE)
        (directory / GRAPH_FILE).write_text(graph.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return made


def _check_operators(source: LoadedArtifact, backend: Backend, text: str) -> None:
    """Raise unless the operators of a graph, given as canonical text, are available here and can be compiled."""
    if not backend.native:
        raise BackendUnavailableError(
            f"the graphs of {source.path} were stored by an earlier version, in a form that the {backend.name} backend "
            "does not take: trace the model again"
        )
    arch = source.manifest.target.get("arch", architecture())
    if arch != architecture():
        raise ArtifactVersionError(
            f"the artifact {source.path} was traced on {arch} and this machine is {architecture()}: trace it again here"
        )
    if backend.compiles and '"nxd.' in text:  # these operators use the rank's transport, which is Python
        raise BackendUnavailableError(
            f"the graphs of {source.path} were traced where the native collectives could not be built, and the "
            f"{backend.name} backend needs them: trace the model again where there is a C++ compiler"
        )
