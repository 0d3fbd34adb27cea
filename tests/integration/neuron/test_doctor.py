"""``nxd-infer doctor`` on machines with Neuron devices: what is there, and one sentence for what is missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nxd_infer.backends import registry
from nxd_infer.backends.base import Availability
from nxd_infer.backends.hlo import base
from nxd_infer.backends.neuron import backend, compiler, cores, sdk
from nxd_infer.backends.xla.training import train_on_replicas
from nxd_infer.errors import ArtifactVersionError, BackendUnavailableError
from tests.support.e2e import command
from tests.support.neuron.machines import FAKE, described


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``machine(instance, devices, torch_neuronx, torch)``: be on such a machine, with those versions installed."""

    def be(instance: str = "inf2.24xlarge", devices: int = 6, package: str = "2.9.0.2.15.32035", torch: str = "2.9.1"):
        described(tmp_path, instance, devices)
        monkeypatch.setenv(cores.ROOT, str(tmp_path))
        monkeypatch.setattr(sdk, "installed", lambda: package)
        monkeypatch.setattr(backend, "torch_version", lambda: torch)

    for name in (cores.VISIBLE, cores.COUNT):
        monkeypatch.delenv(name, raising=False)
    return be


@pytest.mark.parametrize(
    ("instance", "devices", "visible", "shown"),
    [
        ("inf2.24xlarge", 6, None, {"6 Neuron devices of inf2.24xlarge": 12}),
        ("trn1.2xlarge", 1, None, {"1 Neuron device of trn1.2xlarge": 2}),
        ("inf2.24xlarge", 6, "4-7", {"6 Neuron devices of inf2.24xlarge": 4}),
    ],
)
def test_devices_and_the_cores_that_models_may_use(
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    instance: str,
    devices: int,
    visible: str | None,
    shown: dict[str, int],
) -> None:
    machine(instance, devices)
    if visible:
        monkeypatch.setenv(cores.VISIBLE, visible)
    found = backend.BACKEND.probe()
    assert found.ok and found.reason == "" and dict(found.devices) == shown


@pytest.mark.parametrize(
    ("here", "visible", "reason"),
    [
        ({"devices": 0}, None, cores.NO_DEVICE),
        (
            {"package": ""},
            None,
            "torch_neuronx is not installed: install that of the Neuron SDK 2.29 to 2.32: pip install "
            "-e '.[neuron]' in the checkout, in an environment of its own, with AWS' package index as "
            "--extra-index-url (the Neuron SDK's installation guide gives its address)",
        ),
        (
            {"package": "2.10.0.1"},
            None,
            "torch_neuronx 2.10.0.1 is not for torch 2.9, the last one for Inf2 and Trn1: install that of the Neuron "
            "SDK 2.29 to 2.32",
        ),
        (
            {"package": "2.9.0.2.11.19912"},
            None,
            "torch_neuronx 2.9.0.2.11.19912 is of an older SDK than was looked at: install that of the Neuron SDK 2.29 "
            "to 2.32",
        ),
        (
            {"torch": "2.13.0"},
            None,
            "torch_neuronx needs torch 2.9, and this is torch 2.13.0: pip install -e '.[neuron]'",
        ),
        (
            {"instance": "trn2.48xlarge", "devices": 16},
            None,
            "the instance trn2.48xlarge has devices of another kind than Inf2 and Trn1: run on one of them",
        ),
        ({}, "0-99", "names the core 12 and this inf2.24xlarge has 12: name cores from 0 to 11"),
    ],
    ids=[
        *("no device", "no package", "another SDK", "an older SDK", "another torch", "another device"),
        "cores that are not there",
    ],
)
def test_what_is_missing_is_one_sentence(
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    here: dict[str, Any],
    visible: str | None,
    reason: str,
) -> None:
    """The same in the row of doctor and in the error of who wants to run a model."""
    machine(**here)
    if visible:
        monkeypatch.setenv(cores.VISIBLE, visible)
    found = backend.BACKEND.probe()
    assert not found.ok and reason in found.reason and "\n" not in found.reason
    said = command.here("doctor").out
    assert f"neuron: cannot run: {found.reason}" in said.splitlines()
    assert ("Neuron device" in said.replace("\n", "").partition("Optional")[0]) or here.get("devices") == 0


def test_devices_of_another_kind_run_no_graph(machine: Any) -> None:
    """What the runtime would say of the NEFF, or the cores, if it were loaded there."""
    machine("trn2.48xlarge", 16)
    with pytest.raises(ArtifactVersionError, match=r"for trn1, and the instance trn2.48xlarge has devices of another"):
        backend.BACKEND.check_target({"revision": base.REVISION, "platform": "trn1"}, {})


@pytest.mark.parametrize(
    ("torch", "versions", "xla", "neuron"),
    [
        ("2.9.1", {}, "torch_xla is not installed", "torch_xla 2.9 and neuronx-cc"),
        (
            "2.9.1",
            {"torch_xla": "2.8.0"},
            "torch_xla 2.8.0 needs torch 2.8, and this is torch 2.9.1",
            "torch_xla 2.9 (this is 2.8.0) and neuronx-cc",
        ),
        ("2.13.0", {}, "torch_xla is not installed", "torch 2.9 (this is 2.13.0), torch_xla 2.9 and neuronx-cc"),
    ],
    ids=["no torch_xla", "another torch_xla", "another torch"],
)
def test_what_tracing_and_training_lack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch: str, versions: dict[str, str], xla: str, neuron: str
) -> None:
    """All of it at once, and the extra that brings it."""
    import importlib.metadata

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(base.importlib.metadata, "version", version)
    monkeypatch.setattr(base, "torch_version", lambda: torch)
    monkeypatch.setenv("PATH", str(tmp_path))
    xla += ": pip install -e '.[xla]' in the checkout, in an environment of its own"
    assert registry.get("xla").probe_compiler().reason == xla
    found = registry.get("neuron").probe_compiler()
    assert not found.ok and found.reason == f"it lacks {neuron}: {sdk.PIP}"
    monkeypatch.setenv("PATH", os.pathsep.join([str(FAKE / "bin"), "/usr/bin", "/bin"]))
    assert "neuronx-cc:" not in registry.get("neuron").probe_compiler().reason
    with pytest.raises(BackendUnavailableError) as caught:
        train_on_replicas(lambda replica: None, tp=2)
    assert str(caught.value) == xla


@pytest.mark.parametrize("runs", [False, True])
def test_without_neuronx_cc_it_cannot_trace(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: bool
) -> None:
    """A machine that compiles for others needs no device and no runtime: it is told what it lacks for that."""
    machine() if runs else machine("m7i.large", 0, package="")
    monkeypatch.setattr(base, "probe_torch_xla", lambda: Availability(True))
    monkeypatch.setenv("PATH", str(tmp_path))
    said = command.here("doctor").out.splitlines()
    lacks = ["run: torch_neuronx is not installed"] * (not runs) + ["trace: the compiler neuronx-cc was not found"]
    told = [line.partition(": install that of the Neuron SDK")[0] for line in said if line.startswith("neuron: cannot")]
    assert told == [f"neuron: cannot {what}" for what in lacks]
    assert ("torch_neuronx" in backend.BACKEND.probe().versions) == runs
    monkeypatch.setenv("PATH", os.pathsep.join([str(FAKE / "bin"), "/usr/bin", "/bin"]))
    assert backend.BACKEND.probe_compiler().versions[compiler.PROGRAM] == "2.26.6360.0+fake"
