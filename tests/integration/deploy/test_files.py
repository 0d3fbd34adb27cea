"""Dockerfile, manifests, compose file and scripts: each linted by its own tool, and held to what the server is."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nxd_infer.util.options import declared, defaults
from nxd_server.http.api_keys import OPEN_PATHS
from nxd_server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ["cpu", "inf2"]
BIN = Path(sys.executable).parent


def tool(name: str, *arguments: object) -> tuple[int, str]:
    """Run a program of the virtual environment; its status and all that it printed."""
    done = subprocess.run([BIN / name, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def dockerfile_stages() -> dict[str, list[str]]:
    """The instructions of each stage, joined to one line each."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text()))
    stages: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("FROM "):
            stages[line.split()[-1]] = lines = []
        elif stages:
            lines.append(re.sub(r"\s+", " ", line))
    return stages


def objects(text: str) -> dict[str, dict[str, Any]]:
    """Kubernetes objects by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all(text) if found}


def test_hadolint_finds_nothing(tmp_path: Path):
    assert tool("hadolint", "Dockerfile") == (0, "")
    (tmp_path / "Dockerfile").write_text((ROOT / "Dockerfile").read_text().replace("USER 10001:10001", "USER nxd"))
    status, told = tool("hadolint", tmp_path / "Dockerfile")
    assert status != 0 and "Non-numeric" in told


def test_both_targets_end_alike_and_the_default_is_the_cpu():
    stages = dockerfile_stages()
    assert list(stages) == ["wheel", "neuron", "cpu"]
    start = "ENV PATH=/opt/venv/bin:$PATH"
    ends = [
        lines[next(n for n, line in enumerate(lines) if line.startswith(start)) :]
        for name, lines in stages.items()
        if name != "wheel"
    ]
    assert ends[0] == ends[1] and 'CMD ["serve"]' in ends[0] and "USER 10001:10001" in ends[0]
    variables = re.findall(r"NXD_INFER_([A-Z_]+)=", "\n".join(line for line in ends[0] if line.startswith("ENV")))
    assert set(variables) - {"ARTIFACT", "CACHE"} <= {name.upper() for name in declared(ServerSettings)}


def test_what_the_image_is_built_of_is_in_the_context():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in dockerfile_stages()["wheel"] if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == kept and all((ROOT / name).exists() for name in kept)


def test_the_compose_file_is_valid(tmp_path: Path):
    file = DEPLOY / "docker/compose.yaml"
    check = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    assert tool(*check, file)[0] == 0
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(file.read_text().replace("read_only: true", "read_onyl: true"))
    assert tool(*check, wrong)[0] == 1
    services = yaml.safe_load(file.read_text())["services"]
    stages = dockerfile_stages()
    for service in services.values():
        assert service["build"]["target"] in stages
        assert (file.parent / service["build"]["context"]).resolve() == ROOT
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        names = {name.removeprefix("NXD_INFER_").lower() for name in service["environment"] if name.startswith("NXD")}
        assert names - {"artifact"} <= set(declared(ServerSettings))


MANIFESTS = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")


def test_every_manifest_is_valid(tmp_path: Path):
    """But the patches, which are parts of an object, and KEDA's, which is none of Kubernetes' own."""
    whole = [path for path in MANIFESTS if "overlays" not in path.parts and path.name != "scaled-object.yaml"]
    status, told = tool("kubernetes-validate", "--strict", *whole)
    assert status == 0 and "WARN" not in told and told.count("passed for resource") == 7, told
    wrong = tmp_path / "service.yaml"
    wrong.write_text((KUBERNETES / "base/service.yaml").read_text().replace("targetPort", "targetPrt"))
    assert tool("kubernetes-validate", "--strict", wrong)[0] != 0


def test_every_file_that_a_kustomization_names_is_there_and_every_file_is_named():
    named = set()
    for file in KUBERNETES.rglob("kustomization.yaml"):
        found = yaml.safe_load(file.read_text())
        for entry in [*found.get("resources", ()), *(patch.get("path") for patch in found.get("patches", ()))]:
            if entry is not None:
                place = (file.parent / entry).resolve()
                assert (place / "kustomization.yaml" if place.is_dir() else place).is_file(), f"{file}: {entry}"
                named.add(place)
    assert named >= {path.resolve() for path in MANIFESTS}


def rendered(overlay: Path) -> dict[str, dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_kustomize_makes_of_an_overlay(overlay: str, tmp_path: Path):
    found = rendered(KUBERNETES / "overlays" / overlay)
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(found.values()))
    status, told = tool("kubernetes-validate", "--strict", tmp_path / "all.yaml")
    assert status == 0 and "WARN" not in told, told
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


def test_autoscalers_name_a_metric_that_the_server_has():
    metrics = (ROOT / "server/nxd_server/http/ops/metrics.py").read_text()
    scaler = objects((KUBERNETES / "base/autoscaler.yaml").read_text())["HorizontalPodAutoscaler"]
    name = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert f'GaugeMetricFamily("{name}"' in metrics
    assert f"sum({name})" in (KUBERNETES / "components/keda/scaled-object.yaml").read_text()


SCRIPTS = sorted(DEPLOY.rglob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path):
    assert tool("shellcheck", script) == (0, "")


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
        ["bash", "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
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
