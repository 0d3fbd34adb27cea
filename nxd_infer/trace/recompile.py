"""Compile a saved model again, for another CPU or backend, out of the weightless graphs that the artifact keeps.

Neither the model's code nor its checkpoint is needed: the weight files are taken over as they are, and the stored
graph is what a compiler is given after a trace, too. Encodings were chosen by the trace and stay: a graph that reads a
weight plainly (the eager backend's do) goes on to.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.backends import Backend
from nxd_infer.backends.compile.pool import make_workdir
from nxd_infer.backends.compiler_args import split_arguments
from nxd_infer.errors import ArtifactVersionError, BackendUnavailableError
from nxd_infer.graph.lower import canonical_text, configuration, digest_of
from nxd_infer.graph.stored import GRAPH_FILE, IR_FILE, read_graph, read_ir
from nxd_infer.runtime.load import load_artifact
from nxd_infer.trace.assemble import compile_directories
from nxd_infer.trace.options import tracing_backend
from nxd_infer.trace.progress import Progress, silent
from nxd_infer.util.machine import architecture, versions

__all__ = ["parallel_model_recompile"]


def parallel_model_recompile(
    load_dir: str | os.PathLike[str],
    save_dir: str | os.PathLike[str],
    *,
    backend: str | None = None,
    compiler_args: Any = None,
    compiler_workdir: str | os.PathLike[str] | None = None,
    max_parallel_compilations: int | None = None,
    replace: bool = True,
    progress: Progress | None = None,
    compile_timeout: float = 7200.0,
) -> dict[str, Any]:
    """Write the artifact ``load_dir`` to ``save_dir`` with its graphs compiled anew; weights and the rest stay.

    Args:
        load_dir: what ``parallel_model_save`` wrote; its code need not run on this machine.
        save_dir: written whole or not at all; an artifact that is there is replaced in one step.
        backend: default: the artifact's own.
        compiler_args, compiler_workdir, max_parallel_compilations: as in ``parallel_model_trace``; those that the
            artifact was traced with are not remembered. ``cpu_target`` chooses the CPU.
        replace: False refuses a ``save_dir`` that exists.
        progress: called as ``progress(stage, done, total, note)``.
        compile_timeout: seconds that each graph may take.

    Returns:
        ``{"graphs", "compiled", "cached", "ignored_compiler_args", "seconds"}``.

    Raises:
        ArtifactError, ArtifactCorruptError, ArtifactVersionError: as ``load_artifact``.
        TraceConfigError: arguments that the backend does not take. BackendUnavailableError: it cannot compile here, or
            the graphs call operators that cannot be compiled for it. TraceError: compiling failed.
    """
    report = progress or silent
    source = load_artifact(load_dir, runs_here=False)
    found = tracing_backend(backend or source.manifest.backend)
    own, ignored = split_arguments(compiler_args, found.has_option)
    options = found.options(own)
    ArtifactWriter(save_dir, replace=replace).check_target()
    workdir = Path(compiler_workdir) if compiler_workdir is not None else None
    make_workdir(workdir)
    build = Path(tempfile.mkdtemp(prefix="nxd-recompile-"))
    try:
        directories, renamed = _lower(source, found, options, build)
        names = {renamed[old]: bucket.name for bucket in source.manifest.buckets for old in bucket.graphs}
        compiled = compile_directories(
            directories,
            names,
            found,
            options,
            workdir=workdir,
            workers=max_parallel_compilations,
            timeout=compile_timeout,
            progress=report,
        )
        manifest = source.manifest.model_copy(deep=True)
        manifest.backend, manifest.target, manifest.versions = found.name, found.target(options), versions()
        manifest.graphs = {digest: compiled.specs[digest] for digest in sorted(compiled.specs)}
        for bucket in manifest.buckets:
            bucket.graphs = [renamed[old] for old in bucket.graphs]
        report("write artifact", 0, 1, "")
        with ArtifactWriter(save_dir, replace=replace) as writer:
            for name, spec in source.manifest.files.items():
                if not name.startswith("graphs/"):
                    writer.add(name, source.path / name, known=spec)
            for digest, directory in directories.items():
                for file in sorted(path for path in directory.rglob("*") if path.is_file()):
                    writer.add(f"graphs/{digest}/{file.relative_to(directory).as_posix()}", file)
            writer.commit(manifest)
        report("write artifact", 1, 1, "")
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return {
        "graphs": len(directories),
        "compiled": compiled.compiled,
        "cached": compiled.cached,
        "ignored_compiler_args": ignored,
        "seconds": compiled.seconds,
    }


def _lower(
    source: LoadedArtifact, backend: Backend, options: dict[str, Any], build: Path
) -> tuple[dict[str, Path], dict[str, str]]:
    """The graphs without code below ``build``, under the digests they have for ``backend``; and old digest -> new."""
    directories: dict[str, Path] = {}
    renamed: dict[str, str] = {}
    for old in source.manifest.graphs:
        graph, ir = read_graph(source.graph_dir(old), old), read_ir(source.graph_dir(old))
        text = canonical_text(ir, graph, configuration(backend.name, options))
        _check_operators(source, backend, text)
        for content_hash in graph.ops:
            target = build / "ops" / f"{content_hash}.so"
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source.op_file(content_hash), target)
        graph.digest = renamed[old] = digest_of(text)
        directories[graph.digest] = directory = build / "graphs" / graph.digest
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.graph_dir(old) / IR_FILE, directory / IR_FILE)
        (directory / GRAPH_FILE).write_text(graph.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return directories, renamed


def _check_operators(source: LoadedArtifact, backend: Backend, text: str) -> None:
    """Raise unless the operators of a graph, given as canonical text, can be had here, and compiled."""
    arch = source.manifest.target.get("arch", architecture())
    if arch != architecture():
        raise ArtifactVersionError(
            f"the artifact {source.path} was traced on {arch} and this machine is {architecture()}: trace it again here"
        )
    if backend.compiles and '"nxd.' in text:  # run on the rank's transport, which is Python
        raise BackendUnavailableError(
            f"the graphs of {source.path} were traced where the native collectives could not be built, and the "
            f"{backend.name} backend needs them: trace the model again where there is a C++ compiler"
        )
