"""Compile a saved model again, for another machine or backend, from the canonical graphs in the artifact.

Neither the model's code nor its checkpoint is needed: the weight files are reused as they are, and the backend
processes the stored graphs as after a trace.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from nxd_infer.artifact.manifest import FORMAT, PACKED_REQUIREMENT, Manifest
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.backends import registry
from nxd_infer.backends.base import Backend, check_encodings, quantization_of, quantizations_of
from nxd_infer.errors import TraceError
from nxd_infer.graph.canonical import configuration, name_lowered, stored_graph
from nxd_infer.graph.stored import read_graph, write_graph
from nxd_infer.runtime.load import load_artifact
from nxd_infer.trace.assemble import add_graphs, compile_directories, made_by
from nxd_infer.trace.options import RecompileOptions
from nxd_infer.trace.request import make_workdir, options_of, require_stages, tracing_backend
from nxd_infer.util.options import accepts_options

__all__ = ["parallel_model_recompile"]


@accepts_options(RecompileOptions)
def parallel_model_recompile(request: RecompileOptions) -> dict[str, Any]:
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
    progress = request.report
    ArtifactWriter(request.save_dir, replace=request.replace).check_target()
    source = load_artifact(request.load_dir, runs_here=False)
    backend = tracing_backend(request.backend or source.manifest.backend)
    require_stages(backend, source.manifest.pp_degree)
    form, rounded = None, ()
    """The form that it was traced with, and all encodings of its rounded weights, if it has any."""
    if any(weight.encoding for weight in source.manifest.weights):
        traced_for = registry.get(source.manifest.backend)
        check_encodings(source.path, source.manifest, traced_for)
        form = quantization_of(source.manifest, traced_for)
        rounded = tuple(quantizations_of(source.manifest, traced_for))
    options, ignored = options_of(backend, request.compiler_args, request.target, None if form is None else form.name)
    make_workdir(request)
    with tempfile.TemporaryDirectory(prefix="nxd-recompile-", ignore_cleanup_errors=True) as build:
        manifest = source.manifest.model_copy(deep=True)
        directories = _lower(source, manifest, backend, options, rounded, Path(build))
        report = compile_directories(directories, manifest.buckets, backend, options, request)
        manifest.target, manifest.versions = backend.target(options), made_by(report.pop("compiler"))
        progress("write artifact", 0, 1, "")
        with ArtifactWriter(request.save_dir, replace=request.replace) as writer:
            for name, spec in source.manifest.files.items():
                if not name.startswith(("graphs/", "ops/")):
                    writer.add(name, source.path / name, known=spec)
            add_graphs(writer, directories, manifest.ops)
            writer.commit(manifest)
        progress("write artifact", 1, 1, "")
    return {**report, "ignored_compiler_args": ignored}


def _lower(
    source: LoadedArtifact,
    manifest: Manifest,
    backend: Backend,
    options: dict[str, Any],
    rounded: tuple[str, ...],
    build: Path,
) -> dict[str, Path]:
    """Lower the canonical graphs with ``backend``, below ``build``: change ``manifest`` accordingly, and return the new
    graphs' directories by digest. ``rounded``: the encodings that stay."""
    backend.prepare_trace(manifest.tp_degree, options)
    renamed: dict[str, str] = {}
    directories: dict[str, Path] = {}
    ranks = dict.fromkeys(zip(*(bucket.graphs for bucket in manifest.buckets), strict=True))
    if backend.one_program and len(ranks) > 1:
        raise TraceError(
            f"the ranks of {source.path} have {len(ranks)} graphs, and the {backend.name} backend runs one on "
            "all of them: write the model so that a rank is data (nxd_infer.comm.axis_rank) and trace it again"
        )
    for digests in ranks:  # ranks with equal graphs are lowered once
        graphs = [stored_graph(source.graph_dir(digest), rounded) for digest in digests]
        for old, graph, lowered in zip(digests, graphs, backend.passes(graphs, options), strict=True):
            name_lowered(lowered, graph, configuration(backend.name, options))
            if renamed.setdefault(old, lowered.digest) != lowered.digest:
                raise TraceError(
                    f"the ranks of {source.path} share graph {old} and would need it in two forms: trace it again"
                )
            directories[lowered.digest] = write_graph(lowered, build / "graphs" / lowered.digest)
    graphs_of = {digest: read_graph(path, digest) for digest, path in sorted(directories.items())}
    encodings = {weight.name: weight.encoding for graph in graphs_of.values() for weight in graph.weights}
    manifest.format, manifest.backend = FORMAT, backend.name
    manifest.graphs = {digest: graph.spec() for digest, graph in graphs_of.items()}
    manifest.ops = sorted({content_hash for graph in graphs_of.values() for content_hash in graph.ops})
    for weight in manifest.weights:
        weight.encoding = encodings.get(weight.name, "")
    manifest.requires = [name for name in manifest.requires if name != PACKED_REQUIREMENT]
    if any(encodings.values()):
        manifest.requires.append(PACKED_REQUIREMENT)
    _check_still_packed(source, manifest)
    for bucket in manifest.buckets:
        bucket.graphs = [renamed[old] for old in bucket.graphs]
    return directories


def _check_still_packed(source: LoadedArtifact, manifest: Manifest) -> None:
    """Raise TraceError if graphs do not read a weight any more in the form that the artifact's files hold it in."""
    packed = {spec.name for spec in manifest.packed}
    for old, new in zip(source.manifest.weights, manifest.weights, strict=True):
        if old.name in packed and (source.manifest.backend, old.encoding) != (manifest.backend, new.encoding):
            raise TraceError(
                f"{source.path} holds {old.name!r} packed as {old.encoding!r}, and the graphs for {manifest.backend} "
                f"would read {new.encoding or 'the plain weight'!r}: trace the model again, without packed"
            )
