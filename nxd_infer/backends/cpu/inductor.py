"""The inductor backend: AOTInductor on CPU, weights outside the code.

Every state and weight is a graph *input*, so the compiler sees no values: it cannot fold or embed any, ranks share
code, and new weights need no compiler. Compared with constants held by the runner the cost is not measurable (253 and
259 microseconds per call with 154 weights of 64 x 64). Graphs are compiled in separate processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess  # nosec B404
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_infer import backends
from nxd_infer.backends import cpu
from nxd_infer.backends.base import Availability, Executable, RankGraph, RankRuntime
from nxd_infer.backends.cpu.base import CpuBackend
from nxd_infer.backends.cpu.options import PACKED_OPTION, QUANTIZE, packed_option, quantize_option
from nxd_infer.backends.cpu.target import TARGETS, cpu_target
from nxd_infer.errors import ArtifactCorruptError, BackendUnavailableError, TraceConfigError
from nxd_infer.util.machine import architecture, cpu_features, torch_version
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
"""Options that the artifact's form depends on; users cannot change them."""


def _compiler() -> str:
    """Return the C++ compiler that Inductor calls."""
    return os.environ.get("CXX", "g++")


@functools.cache
def _compiler_version(compiler: str) -> str:
    """Return the version text of the C++ compiler; empty if there is none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [compiler, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)  # nosec B603  # the user's compiler
        return done.stdout.split("\n")[0]
    return ""


class InductorBackend(CpuBackend):
    """``backend="inductor"``. ``compiler_args`` are options of ``torch._inductor.config``, ``cpu_target``, and
    ``nxd_packed`` (False keeps weights plain)."""

    name = "inductor"
    compiles = True
    compile_imports = "nxd_infer.backends.cpu.compiler_imports"
    target_option = CPU_TARGET
    targets = TARGETS
    same_rounding: Mapping[str, Any] = {"emulate_precision_casts": True}  # to each dtype, whatever is fused

    def probe(self) -> Availability:
        if _loader_class() is None or not takes_march():
            reason = f"it needs torch 2.13 or newer, this is {torch_version()}: install that, or use backend='cpu'"
            return Availability(False, reason, {"torch": torch_version()})
        return self.available()

    def probe_compiler(self) -> Availability:
        """Whether graphs can be compiled here: loading needs no compiler, tracing does."""
        compiler = _compiler()
        if shutil.which(compiler) is None:
            return Availability(
                False, f"the C++ compiler {compiler!r} was not found: install g++, set CXX, or use backend='cpu'"
            )
        return self.probe()

    def compiler(self) -> str:
        return _compiler_version(_compiler())

    def has_option(self, name: str) -> bool:
        return name in _known_options()

    def options(self, given: Mapping[str, Any], quantize: str | None = None) -> dict[str, Any]:
        """Return the user's options, checked and completed.

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
        return dict(sorted({**options, **quantize_option(quantize, options)}.items()))

    def prepare_trace(self, tp_degree: int, options: Mapping[str, Any]) -> None:
        """Build the native operators: compiled graphs of several ranks need them."""
        if cpu.operators.native_library() is None and tp_degree > 1:
            raise BackendUnavailableError(
                f"the {self.name} backend needs the native collectives for tp_degree={tp_degree}: "
                f"{cpu.operators.reason_for_none()}; use backend='cpu'"
            )

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        chosen = cpu_target(options.get(CPU_TARGET), cpu_features())
        march = options.get("cpp.march", chosen.march)
        features = chosen.features if march == chosen.march else tuple(sorted(cpu_features()))
        found: dict[str, Any] = {"arch": architecture(), "march": march, "cpu_features": sorted(features)}
        if not options.get("cpp.dynamic_threads"):
            import torch

            found["threads"] = options.get("cpp.threads") or torch.get_num_threads()
        return found

    def environment(self, workdir: Path) -> Mapping[str, str]:
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(workdir / "inductor"),
            "TRITON_CACHE_DIR": str(workdir / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # What the target needs is known, and the compiler is given its flags: trying them out takes seconds.
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
        }

    def compile(self, graph_dir: Path, options: Mapping[str, Any]) -> None:
        settings = {key: value for key, value in options.items() if key not in (CPU_TARGET, PACKED_OPTION, QUANTIZE)}
        simdlen = cpu_target(options.get(CPU_TARGET), cpu_features()).simdlen
        cpu.compiling.compile_here(graph_dir, {**settings, **_FIXED}, graph_dir / CODE, simdlen)

    def load(self, ranks: Sequence[RankGraph], runtime: RankRuntime) -> Executable:
        (rank,) = ranks
        graph = backends.checks.checked_graph(rank, runtime)
        package = rank.directory / PACKAGE
        if not list((rank.directory / CODE).glob("*.so")):
            raise ArtifactCorruptError(f"{package} holds no compiled graph; trace again")
        if strange := cpu.package.strays(rank.directory / CODE):
            raise ArtifactCorruptError(f"{package} holds {strange[0]!r}, which might be run as code: remove that file")
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
        return cpu.executable.CpuExecutable(graph, rank.states, rank.weights, cpu.program.Function(loader.run))


@functools.cache
def takes_march() -> bool:
    """Whether inductor can be told which CPU to compile for. Without, code is for this very machine, and a loader of
    those releases reads no unpacked code either. The settings are read as text: to import inductor takes a second."""
    import torch

    settings = Path(torch.__file__).parent / "_inductor" / "config.py"
    return re.search(r"^    march\b", settings.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _loader_class() -> Any:
    import torch

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


BACKEND = InductorBackend()
