"""Dockerfile, compose file and manifests are held to what the server is; `make lint` runs the tools of each kind."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from nxd_infer.util.options import declared
from nxd_server.http.ops.metrics import OF_ENGINES
from nxd_server.http.request_body import LARGEST_LIMIT
from nxd_server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


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


def test_both_targets_end_alike_and_the_default_is_the_cpu():
    stages = dockerfile_stages()
    assert {"neuron", "cpu"} <= set(stages) and list(stages)[-1] == "cpu"
    start = "ENV NXD_INFER_ARTIFACT"
    ends = [
        lines[next(n for n, line in enumerate(lines) if line.startswith(start)) :]
        for lines in (stages["neuron"], stages["cpu"])
    ]
    assert ends[0] == ends[1] and 'CMD ["serve"]' in ends[0] and "USER 10001:10001" in ends[0]
    variables = re.findall(r"NXD_INFER_([A-Z_]+)=", "\n".join(line for line in ends[0] if line.startswith("ENV")))
    assert set(variables) - {"ARTIFACT", "CACHE"} <= {name.upper() for name in declared(ServerSettings)}


def test_what_the_image_is_built_of_is_in_the_context():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in dockerfile_stages()["wheel"] if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == kept and all((ROOT / name).exists() for name in kept)


def test_the_compose_file_names_what_there_is():
    file = DEPLOY / "docker/compose.yaml"
    services = yaml.safe_load(file.read_text())["services"]
    stages = dockerfile_stages()
    for service in services.values():
        assert service["build"]["target"] in stages
        assert (file.parent / service["build"]["context"]).resolve() == ROOT
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        names = {name.removeprefix("NXD_INFER_").lower() for name in service["environment"] if name.startswith("NXD")}
        assert names - {"artifact"} <= set(declared(ServerSettings))


def test_the_proxy_is_as_patient_as_the_server_and_takes_its_largest_body():
    text = (DEPLOY / "proxy/nginx.conf").read_text()
    patience, size = (int(re.findall(rf"{name} (\d+)", text)[0]) for name in ("proxy_read_timeout", "max_body_size"))
    assert patience > ServerSettings().request_timeout and size * 2**20 == LARGEST_LIMIT
    (closed,) = re.findall(r"location ~ \^/\(([^)]*)\)", text)
    app = (ROOT / "server/nxd_server/http/app.py").read_text()
    assert all(f'"/{path}"' in app for path in closed.split("|"))


MANIFESTS = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")


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


def test_autoscalers_name_a_metric_that_the_server_has():
    scaler = yaml.safe_load((KUBERNETES / "base/autoscaler.yaml").read_text())
    name = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert (name.removeprefix("nxd_"), "gauge") in [row[:2] for row in OF_ENGINES]
    assert f"sum({name})" in (KUBERNETES / "components/keda/scaled-object.yaml").read_text()
