"""``backend="neuron"``: HLO made once for all ranks, compiled by neuronx-cc, run on the NeuronCores of Inf2 and Trn1.

All but the calls of :mod:`.runtime` runs on any machine. Those calls, the compiler and a core were not at hand: what
was not run on hardware is held to ``contracts/torch_neuronx_2_9.json``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxd_infer.artifact.manifest import Manifest
from nxd_infer.backends.base import WORDS, Availability, Executable, Placement, RankGraph, RankRuntime
from nxd_infer.backends.hlo import base
from nxd_infer.backends.hlo.base import HloBackend
from nxd_infer.backends.neuron import compiler, cores, sdk
from nxd_infer.errors import ArtifactVersionError, BackendUnavailableError, TraceConfigError
from nxd_infer.util.machine import torch_minor, torch_version

TARGET = "target"
_claims: list[cores.Claim] = []
"""The cores of this process: one group, until it ends."""


class NeuronBackend(HloBackend):
    """``compiler_args``: ``target`` (``inf2`` or ``trn1``; the default is this machine) and words for neuronx-cc."""

    name = "neuron"
    cross_compiles = True
    neuron_arguments = True
    target_option = TARGET
    targets = tuple(cores.DEGREES)
    kept = compiler.KEPT

    def probe(self) -> Availability:
        found, package = {"torch": torch_version()}, sdk.installed()
        if package:
            found["torch_neuronx"] = package
        reason = sdk.check_version(package)
        if not reason and torch_minor(found["torch"]) != sdk.TORCH:
            reason = f"torch_neuronx needs torch {sdk.TORCH}, and this is torch {found['torch']}: {sdk.PIP}"
        here, usable = cores.machine(), 0
        if not here.devices:
            return Availability(False, reason or cores.NO_DEVICE, found)
        if here.others:
            return Availability(False, here.others, found, {here.name: 0})
        try:
            _, usable = cores.usable(here)
        except BackendUnavailableError as error:
            reason = reason or str(error)
        return Availability(not reason, reason, found, {here.name: usable})

    def probe_compiler(self) -> Availability:
        lowering = base.probe_torch_xla()
        if not lowering.ok:
            return Availability(False, _lacking(lowering.versions), lowering.versions)
        try:
            return Availability(True, "", {**lowering.versions, compiler.PROGRAM: compiler.version()})
        except BackendUnavailableError as error:
            return Availability(False, str(error), lowering.versions)

    def has_option(self, name: str) -> bool:
        return name == TARGET

    def options(self, given: Mapping[str, Any], quantize: str | None = None) -> dict[str, Any]:
        if unknown := sorted(given.keys() - {TARGET, WORDS}):
            raise TraceConfigError(
                f"compiler_args: the neuron backend has the option {TARGET} and takes arguments of neuronx-cc, got "
                f"{unknown[0]!r}"
            )
        arguments = compiler.read_arguments(given.get(WORDS, ()), str(given.get(TARGET, "")))
        target = arguments.target or cores.machine().platform
        if not target:
            raise TraceConfigError(
                "this machine is neither an Inf2 nor a Trn1 instance: say for which one to compile, by --target inf2 "
                "or --target trn1 (compiler_args='--target inf2')"
            )
        return {TARGET: target, WORDS: arguments.words, "compiler": compiler.version()}

    def prepare_trace(self, tp_degree: int, options: Mapping[str, Any]) -> None:
        """Refuse a degree before any rank is traced."""
        cores.check_degree(tp_degree, options[TARGET])

    def compiler(self) -> str:
        return f"{super().compiler()}, {compiler.PROGRAM} {compiler.version()}"

    def compile(self, graph_dir: Path, options: Mapping[str, Any]) -> None:
        from nxd_infer.backends.neuron import lower  # slow: torch

        lower.lower_directory(graph_dir)
        compiler.compile_here(graph_dir, options)

    def target(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().target(options), "platform": options[TARGET], "compiler": options["compiler"]}

    def check_target(self, target: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        super().check_target(target, versions)
        made, used = (str(text).endswith(sdk.FAKE) for text in (target.get("compiler"), sdk.installed()))
        if made and not used:
            raise ArtifactVersionError(
                f"was compiled by {target.get('compiler')}, a stand-in of tests, and runs on no NeuronCore: trace it "
                "again with neuronx-cc"
            )
        here = cores.machine()
        if here.others:
            raise ArtifactVersionError(f"was compiled for {target.get('platform')}, and {here.others}")
        if here.platform and target.get("platform") != here.platform:
            raise ArtifactVersionError(
                f"was compiled for {target.get('platform')} and {here} is {here.platform}: trace it again with "
                f"--target {here.platform}"
            )

    def place(self, manifest: Manifest, weight_file: Path, runtime: RankRuntime) -> Placement:
        from nxd_infer.backends.hlo.placement import DevicePlacement  # slow: torch
        from nxd_infer.backends.neuron.executable import CoreCell

        _start(manifest.tp_degree)
        return DevicePlacement(manifest, weight_file, CoreCell)

    def load(self, ranks: Sequence[RankGraph], runtime: RankRuntime) -> Executable:
        from nxd_infer.backends.neuron.executable import NeuronExecutable  # slow: torch

        return NeuronExecutable(ranks, runtime)


def _lacking(versions: Mapping[str, str]) -> str:
    """All that tracing needs and is not among these versions of torch and torch_xla, or not on this machine."""
    found = {name: versions.get(name, "") for name in ("torch", "torch_xla")}
    lacks = [
        f"{name} {sdk.TORCH}{f' (this is {version})' if version else ''}"
        for name, version in found.items()
        if not version or torch_minor(version) != sdk.TORCH
    ]
    lacks += [] if shutil.which(compiler.PROGRAM) else [compiler.PROGRAM]
    return f"it lacks {', '.join(lacks[:-1])}{' and ' if lacks[1:] else ''}{lacks[-1]}: {sdk.PIP}"


def _start(degree: int) -> None:
    """Take cores for this process, and start the runtime on them; nothing the second time."""
    if not _claims:
        claim = cores.claim(degree)
        try:
            from nxd_infer.backends.neuron import runtime  # slow: torch

            runtime.load()
        except BaseException:
            claim.close()
            raise
        _claims.append(claim)
    taken = _claims[0].cores
    if len(taken) != degree:
        raise BackendUnavailableError(
            f"this process runs a model on {len(taken)} cores, which it keeps until it ends, and this one needs "
            f"{degree}: load it in another process"
        )


BACKEND = NeuronBackend()
