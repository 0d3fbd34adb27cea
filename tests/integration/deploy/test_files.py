"""What kustomize makes of the manifests, held to what the server is; the user data of EC2, run with stand-ins."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nxd_infer.util.options import declared, defaults
from nxd_server.http.request_context import OPEN_PATHS
from nxd_server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ["cpu", "inf2"]


def rendered(overlay: Path) -> dict[str, dict[str, Any]]:
    """The objects by kind."""
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {found["kind"]: found for found in yaml.safe_load_all(done.stdout) if found}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_kustomize_makes_of_an_overlay(overlay: str):
    found = rendered(KUBERNETES / "overlays" / overlay)
    pods = {kind: found[kind]["spec"]["template"] for kind in ("Deployment", "Job")}
    settings = found["ConfigMap"]
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        assert container["image"] == f"my-registry/nxd-infer:{'cpu' if overlay == 'cpu' else 'neuron'}"
        assert container["envFrom"][0]["configMapRef"]["name"] == settings["metadata"]["name"]
        assert container["securityContext"]["readOnlyRootFilesystem"] and pod["spec"]["securityContext"]["runAsNonRoot"]
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001  # the image's
        assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    names = {name.removeprefix("NXD_INFER_").lower() for name in settings["data"]}
    assert names - {"artifact"} <= set(declared(ServerSettings))
    (server,) = pods["Deployment"]["spec"]["containers"]
    asked = {name: server[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert set(asked.values()) <= OPEN_PATHS and asked["readinessProbe"] == "/readyz"
    patience = server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"]
    assert patience >= defaults(ServerSettings)["prepare_timeout"] + 300
    grace = pods["Deployment"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= defaults(ServerSettings)["drain_timeout"] + 5 + 8
    labels = pods["Deployment"]["metadata"]["labels"]
    for selector in (
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items() and not selector.items() <= pods["Job"]["metadata"]["labels"].items()
    devices = server["resources"]["limits"].get("aws.amazon.com/neuron")
    assert devices == (1 if overlay == "inf2" else None)
    assert "aws.amazon.com/neuron" not in json.dumps(pods["Job"])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_keda_in_place_of_the_autoscaler(tmp_path: Path):
    shutil.copytree(KUBERNETES, tmp_path / "k")
    file = tmp_path / "k/overlays/cpu/kustomization.yaml"
    file.write_text(file.read_text() + "components:\n  - ../../components/keda\n")
    found = rendered(file.parent)
    assert "HorizontalPodAutoscaler" not in found
    spec = found["ScaledObject"]["spec"]
    assert spec["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    (trigger,) = spec["triggers"]
    assert trigger["type"] == "prometheus" and all(isinstance(value, str) for value in trigger["metadata"].values())
    assert {"serverAddress", "query", "threshold"} <= set(trigger["metadata"])


STAND_INS = ("apt-get", "aws", "chown", "curl", "docker", "gpg", "install", "modprobe", "openssl", "snap")


@pytest.mark.parametrize(
    ("devices", "target", "tp"), [(1, "inf2", 2), (16, "trn1", 32), (0, "inf2", 2)], ids=["inf2", "trn1", "none"]
)
def test_user_data_runs_the_server_on_every_device(devices: int, target: str, tp: int, tmp_path: Path):
    """With programs in place of those that change a machine; each writes down how it was called."""
    (tmp_path / "bin").mkdir()
    for name in STAND_INS:
        program = tmp_path / "bin" / name
        call = f'#!/bin/bash\nline=$(printf "%q " {name} "$@")\n'
        program.write_text(call + f'echo "$line" >> {tmp_path}/calls\n')  # at once: programs of a pipe run together
        program.chmod(0o755)
    for number in range(devices):
        (tmp_path / f"neuron{number}").touch()
    text = (DEPLOY / "ec2/user-data.sh").read_text()
    for old, new in {
        "TARGET=inf2": f"TARGET={target}",
        "TP=2": f"TP={tp}",
        "DEVICES=/dev/neuron": f"DEVICES={tmp_path}/neuron",
        "/etc/nxd-infer/": f"{tmp_path}/",
        "/etc/apt/sources.list.d/": f"{tmp_path}/",
    }.items():
        assert old in text
        text = text.replace(old, new)
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, timeout=60, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    )
    calls = [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]
    if not devices:
        assert done.returncode == 1 and "there is no" in done.stderr and "Inf2 or Trn1" in done.stderr
        assert ["modprobe", "neuron"] in calls and any("aws-neuronx-dkms=2.29.0.*" in call for call in calls)
        assert not any(call[0] == "docker" for call in calls)
        return
    assert done.returncode == 0, done.stderr
    assert not any(call[0] == "modprobe" for call in calls)  # the driver was there
    started = next(call for call in calls if call[:2] == ["docker", "run"])
    assert started.count("--device") == devices and f"{tmp_path}/neuron{devices - 1}" in started
    assert f"NXD_INFER_TRACE_OPTIONS=--backend neuron --target {target} --tp {tp}" in started
    assert started[-1] == "serve" and "--read-only" in started
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0
