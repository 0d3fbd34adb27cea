"""Which CPU code is compiled for: a named target, the compiler flag for it, and the CPU features it needs.

The default is the highest x86-64 level this machine has (the psABI's v2, v3, v4), not ``native``, so that the artifact
can name what it needs in three words and runs on other machines of that level.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxd_infer.errors import ArtifactCorruptError, ArtifactVersionError, TraceConfigError
from nxd_infer.util.machine import architecture, cpu_features

_V2 = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")


@dataclass(frozen=True)
class CpuTarget:
    """The value of ``-march``, the vector width in bits (0: none), and the needed flags of ``/proc/cpuinfo``."""

    name: str
    march: str
    simdlen: int
    features: tuple[str, ...]


_TARGETS = {
    "x86-64-v2": CpuTarget("x86-64-v2", "x86-64-v2", 1, _V2),
    "x86-64-v3": CpuTarget("x86-64-v3", "x86-64-v3", 256, _V3),
    "x86-64-v4": CpuTarget("x86-64-v4", "x86-64-v4", 512, _V4),
}


TARGETS = ("native", *_TARGETS)
"""Values of the option ``cpu_target``."""


def cpu_target(name: str | None, present: frozenset[str], machine: str | None = None) -> CpuTarget:
    """Return the target called ``name`` (None: the best this machine has; ``native``: exactly this machine).

    ``present`` are this machine's features. Compiling for a higher level than the machine has is refused, since what
    is compiled is also run here. Raises TraceConfigError listing the targets.
    """
    machine = machine or platform.machine()
    if machine != "x86_64" or name == "native":
        if name not in (None, "native"):
            raise TraceConfigError(f"cpu_target {name!r} is for x86_64, this machine is {machine}; use 'native'")
        return CpuTarget("native", "native", 0, tuple(sorted(present)))
    if name is None:
        fitting = [target for target in _TARGETS.values() if present >= set(target.features)]
        return fitting[-1] if fitting else CpuTarget("x86-64", "x86-64", 1, ())
    if name not in _TARGETS:
        raise TraceConfigError(f"there is no cpu_target {name!r}; targets are {', '.join(TARGETS)}")
    missing = sorted(set(_TARGETS[name].features) - present)
    if missing:
        raise TraceConfigError(f"cpu_target {name!r} needs {', '.join(missing)}, which this machine lacks")
    return _TARGETS[name]


def describe_target() -> dict[str, object]:
    """Return ``manifest.target`` of code that needs no CPU feature beyond the architecture's baseline."""
    return {"arch": architecture(), "cpu_features": []}


def check_cpu(target: Mapping[str, Any]) -> None:
    """``Backend.check_target``: raise ArtifactVersionError for a processor that lacks what the graphs need."""
    arch = target.get("arch")
    if arch and arch != architecture():
        raise ArtifactVersionError(f"was compiled for {arch} and this machine is {architecture()}: trace it again here")
    features = target.get("cpu_features") or []
    if not isinstance(features, list):
        raise ArtifactCorruptError(f"has a damaged manifest: its cpu_features are {features!r:.80}")
    missing = sorted({str(feature) for feature in features} - cpu_features()) if cpu_features() else []
    if missing:
        raise ArtifactVersionError(
            f"was compiled for a CPU with {', '.join(missing)}, which this one lacks: "
            "use `nxd-infer recompile` here, or trace it again with --target for this CPU"
        )
