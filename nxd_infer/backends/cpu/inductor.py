"""The inductor backend: AOTInductor on CPU, weights outside the code.

Every state and weight is a graph *input*, so that the compiler never sees a value: nothing can be folded or baked in,
ranks share code, and new weights need no compiler. The cost against constants held by the runner is not measurable
(253 against 259 microseconds a call with 154 weights of 64 x 64). Compiling happens in processes of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import GraphSpec
from nxd_infer.backends.base import Availability, Executable, RankRuntime
from nxd_infer.backends.cpu.executable import CpuExecutable, check_spec
from nxd_infer.backends.cpu.package import strays
from nxd_infer.backends.cpu.target import cpu_target
from nxd_infer.errors import ArtifactCorruptError, ArtifactVersionError, BackendUnavailableError, TraceConfigError
from nxd_infer.graph.packing import OPTION as PACKED_OPTION
from nxd_infer.graph.packing import packed_option
from nxd_infer.graph.stored import read_graph
from nxd_infer.util.machine import architecture, cpu_features, torch_minor
from nxd_infer.util.suggest import did_you_mean

PACKAGE = "inductor"
MODEL = "model"
CODE = f"{PACKAGE}/data/aotinductor/{MODEL}"
CPU_TARGET = "cpu_target"

_FIXED: dict[str, Any] = {
    "aot_inductor.custom_op_libs": None,
    "aot_inductor.custom_ops_to_c_shims": {},
    "aot_inductor.package": True,
    "aot_inductor.precompile_headers": False,
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "compile_threads": 1,
    "cpp_cache_precompile_headers": False,
    "freezing": False,
    "fx_graph_cache": False,
}
"""What the artifact's form depends on; not the user's to change."""


class InductorBackend:
    """``backend="inductor"``. ``compiler_args`` are options of ``torch._inductor.config``, ``cpu_target``, and
    ``nxd_packed`` (False keeps linears over plain weights)."""

    name = "inductor"
    compiles = True

    def probe(self) -> Availability:
        versions = {"torch": torch.__version__}
        if _loader_class() is None:
            return Availability(False, f"torch {torch.__version__} has no AOTInductor package loader", versions)
        return Availability(True, "", versions)

    def probe_compiler(self) -> Availability:
        """Whether graphs can be compiled here: loading needs no compiler, tracing does."""
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return Availability(
                False, f"the C++ compiler {compiler!r} was not found: install g++, set CXX, or use backend='eager'"
            )
        return self.probe()

    def has_option(self, name: str) -> bool:
        return name in _known_options()

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The user's options checked and completed.

        Raises TraceConfigError for an unknown option (with close matches), one this package sets itself, or a value
        of another type than the option's.
        """
        given = dict(given)
        target = cpu_target(given.pop(CPU_TARGET, None), cpu_features())
        options: dict[str, Any] = {
            CPU_TARGET: target.name,
            PACKED_OPTION: packed_option(given.pop(PACKED_OPTION, True)),
            "cpp.march": target.march,
            "cpp.dynamic_threads": True,
        }
        if target.simdlen:
            options["cpp.simdlen"] = target.simdlen
        if given:
            _check_options(given)
            options.update(given)
            if "cpp.threads" in given:
                options.setdefault("cpp.dynamic_threads", False)
                options["cpp.dynamic_threads"] = given.get("cpp.dynamic_threads", False)
        return dict(sorted(options.items()))

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        chosen = cpu_target(options.get(CPU_TARGET), cpu_features())
        march = options.get("cpp.march", chosen.march)
        features = chosen.features if march == chosen.march else tuple(sorted(cpu_features()))
        found: dict[str, Any] = {"arch": architecture(), "march": march, "cpu_features": sorted(features)}
        if not options.get("cpp.dynamic_threads"):
            found["threads"] = options.get("cpp.threads") or torch.get_num_threads()
        return found

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        needed = torch_minor(versions.get("torch", ""))
        if needed != torch_minor(torch.__version__):
            raise ArtifactVersionError(
                f"the graphs were compiled by torch {versions.get('torch', 'of an unknown version')}, this is "
                f"{torch.__version__}: trace again, or install torch {needed}"
            )
        arch = target.get("arch", architecture())
        missing = sorted(set(target.get("cpu_features", ())) - cpu_features()) if cpu_features() else []
        if arch != architecture() or missing:
            what = f"lacks {', '.join(missing)}" if missing else f"is {architecture()}"
            raise ArtifactVersionError(
                f"the graphs were compiled for {arch} ({target.get('march', 'unknown')}) and this machine {what}: "
                "trace again here, or with cpu_target for the machine that serves"
            )

    def compile(
        self,
        graph_dir: str | os.PathLike[str],
        options: Mapping[str, Any],
        workdir: str | os.PathLike[str] | None = None,
    ) -> None:
        from nxd_infer.backends.compile.pool import compile_graphs

        compile_graphs(self.name, [Path(graph_dir)], options, workdir=Path(workdir) if workdir else None, workers=1)

    def load(
        self,
        graph_dir: str | os.PathLike[str],
        spec: GraphSpec,
        states: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        runtime: RankRuntime,
    ) -> Executable:
        graph = read_graph(graph_dir, spec.digest)
        check_spec(graph, spec, runtime)
        package = Path(graph_dir) / PACKAGE
        if not list((Path(graph_dir) / CODE).glob("*.so")):
            raise ArtifactCorruptError(f"{package} holds no compiled graph; trace again")
        if found := strays(Path(graph_dir) / CODE):
            raise ArtifactCorruptError(f"{package} holds {found[0]!r}, which might be run as code: remove that file")
        found = _loader_class()
        if found is None:
            raise BackendUnavailableError(self.probe().reason)
        try:
            # One runner: calls are serialised by the rank. Device -1 is the CPU.
            loader = found(str(package), MODEL, True, 1, -1)
        except RuntimeError as error:
            raise ArtifactCorruptError(f"{package} cannot be loaded: {error}") from error
        if loader.get_constant_fqns():
            raise ArtifactCorruptError(f"{package} holds constants of its own; it was not written by this package")
        return CpuExecutable(graph, states, weights, loader.run)


def _loader_class() -> Any:
    return getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)


def _known_options() -> set[str]:
    import torch._inductor

    return {*torch._inductor.list_options(), CPU_TARGET, PACKED_OPTION}


def _check_options(given: Mapping[str, Any]) -> None:
    from torch._inductor import config

    known = _known_options()
    for key, value in given.items():
        if key in _FIXED:
            raise TraceConfigError(f"compiler_args: {key!r} is set to {_FIXED[key]!r} by this package; leave it out")
        if key not in known:
            hint = did_you_mean(key, known, most=3)
            raise TraceConfigError(f"compiler_args: the inductor backend has no option {key!r}{hint}")
        default = config.get_config_copy().get(key)
        if default is not None and value is not None and not _same_type(default, value):
            raise TraceConfigError(
                f"compiler_args: {key}={value!r} must be {type(default).__name__}, like its default {default!r}"
            )


def _same_type(default: Any, value: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(default))


def compile_here(graph_dir: Path, options: Mapping[str, Any]) -> None:
    """Compile in this process, which is one made for it: inductor keeps global state and reads its environment."""
    import torch._inductor

    from nxd_infer.backends.cpu.package import collectives_of_package, unpack
    from nxd_infer.graph.lower import graph_module
    from nxd_infer.graph.operators import register_operators
    from nxd_infer.graph.stored import read_graph
    from nxd_infer.native import link_name, linkable, shims

    graph = read_graph(graph_dir)
    direct = [library for library in register_operators(graph, graph_dir) if shims([library])]
    examples = [
        torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype)
        for spec in (*graph.states, *graph.inputs, *graph.weights)
    ]
    settings = {**{k: v for k, v in options.items() if k not in (CPU_TARGET, PACKED_OPTION)}, **_FIXED}
    settings["aot_inductor.custom_ops_to_c_shims"] = shims(direct)
    settings["aot_inductor.custom_op_libs"] = [link_name(library.hash) for library in direct]
    with torch.no_grad(), linkable(direct):
        files = torch._inductor.aot_compile(graph_module(graph_dir), tuple(examples), options=settings)
    code = graph_dir / CODE
    unpack(files, code)
    found = collectives_of_package(files, graph.ops)
    if found is not None:
        graph.collectives = found
        from nxd_infer.graph.stored import GRAPH_FILE

        (graph_dir / GRAPH_FILE).write_text(graph.model_dump_json(indent=1) + "\n", encoding="utf-8")


BACKEND = InductorBackend()
