"""The images, built of the Dockerfile and run (see containers.py): `make test-image`, which `make test` leaves out."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_infer.artifact.reader import read_artifact
from tests.integration.image.containers import Container, Image, base_image, missing
from tests.support.checkpoint.s3_server import s3_server
from tests.support.tiny_models import write_tiny

TRACE = "--dtype float32 --batch-sizes 1 --prompt-buckets 16 --max-len 64"
QUESTION = {"prompt": "ab", "max_tokens": 4, "temperature": 0}


def built(target: str, base: str, *steps: str) -> Iterator[Image]:
    if lacking := missing():
        pytest.fail(lacking)
    image = Image(target, base_image(base, *steps))
    yield image
    image.close()


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    yield from built("cpu", "debian-python")


def directory(path: Path) -> Path:
    """One that the image's user may write to."""
    path.mkdir()
    os.chown(path, 10001, 10001)
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    path.chmod(0o755)
    path.parent.chmod(0o755)
    path.parent.parent.chmod(0o755)
    write_tiny("llama", path / "llama")
    (path / "llama/model.safetensors").chmod(0o644)  # safetensors lets its owner read it alone
    return path / "llama"


@pytest.fixture(scope="session")
def first(
    image: Image, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[str], dict]]:
    """Two containers that start at once with one model and one volume: the volume, their logs, one's answer."""
    volume = directory(tmp_path_factory.mktemp("volume") / "kept")
    mounts = {"/opt/ml/model:ro": model, "/var/lib/nxd-infer": volume}
    one = {"NXD_INFER_TRACE_OPTIONS": TRACE, "NXD_INFER_PORT": "8180"}
    other = {**one, "NXD_INFER_PORT": "8181"}
    with Container(image, mounts=mounts, environment=one) as a, Container(image, mounts=mounts, environment=other) as b:
        answers = [container.wait_ready().post("/invocations", QUESTION).json() for container in (a, b)]
        texts = {answer["choices"][0]["text"] for answer in answers}
        assert len(texts) == 1, answers
        assert [a.stop(), b.stop()] == [0, 0], a.log + b.log
        yield volume, [a.log, b.log], answers[0]


def test_a_model_is_traced_by_one_container_and_served_by_both(first):
    volume, logs, answer = first
    assert answer["usage"]["completion_tokens"] == 4
    assert sorted("graphs to compile       none" in log for log in logs) == [False, True], logs
    (artifact,) = [path for path in volume.iterdir() if (path / "manifest.json").exists()]
    assert read_artifact(artifact).manifest.backend == "cpu" and list((artifact / "ops").glob("*.so"))
    assert artifact.stat().st_uid == 10001
    assert sorted(path.name for path in volume.iterdir()) == [f".{artifact.name}.lock", artifact.name]


def test_the_next_start_finds_it_on_a_volume_that_is_read_only(first, image: Image, model: Path):
    volume, _, answer = first
    mounts = {"/opt/ml/model:ro": model, "/var/lib/nxd-infer:ro": volume}
    with Container(image, mounts=mounts, environment={"NXD_INFER_TRACE_OPTIONS": TRACE}) as container:
        container.wait_ready()
        assert "was made by an earlier start" in container.log
        assert container.post("/invocations", QUESTION).json()["choices"] == answer["choices"]
        status = dict(line.split(":\t", 1) for line in container.inside("cat", "/proc/1/status").stdout.splitlines())
        assert status["Name"] == "tini" and status["Uid"].split() == ["10001"] * 4 and int(status["CapEff"], 16) == 0
        for place in ("/x", "/opt/venv/x", "/opt/ml/model/x", "/var/lib/nxd-infer/x"):
            assert "Read-only file system" in container.inside("touch", place).stderr
        names = container.inside("sh", "-c", "cat /proc/[0-9]*/comm").stdout
        assert "nxd rank 0" in names
        check = image.config["Healthcheck"]["Test"]
        assert check[0] == "CMD" and container.inside(*check[1:]).returncode == 0
        assert container.stop() == 0, container.log


def test_an_artifact_of_a_volume_and_one_of_a_bucket(first, image: Image, tmp_path: Path):
    volume, _, answer = first
    (artifact,) = [path for path in volume.iterdir() if (path / "manifest.json").exists()]
    with Container(image, ("serve",), {"/opt/ml/model:ro": artifact}) as container:  # as SageMaker has it
        assert container.wait_ready().post("/invocations", QUESTION).json()["choices"] == answer["choices"]
        assert container.stop() == 0
    kept = directory(tmp_path / "kept")
    with s3_server() as (endpoint, objects, _):
        for path in artifact.rglob("*"):
            if path.is_file():
                objects[f"models/llama/{path.relative_to(artifact).as_posix()}"] = path.read_bytes()
        keys = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
        place = {"NXD_INFER_ARTIFACT": "s3://models/llama", "AWS_DEFAULT_REGION": "us-east-1", **keys}
        with Container(image, mounts={"/var/lib/nxd-infer": kept}, environment=place) as container:
            assert container.wait_ready().post("/invocations", QUESTION).json()["choices"] == answer["choices"]
            assert container.stop() == 0
            assert "fetching s3://models/llama" in container.log


def test_other_commands_and_failures(image: Image):
    with Container(image, ("doctor",)) as container:
        assert container.wait(120) == 0 and "2.13" in container.log, container.log
    with Container(image) as container:
        assert container.wait(120) == 1
        assert "/opt/ml/model is not an artifact" in container.log
    with Container(image, ("trace",)) as container:
        assert container.wait(120) == 2 and "model_dir" in container.log.lower()


def test_the_image_says_what_platforms_read(image: Image):
    assert image.config["User"] == "10001:10001"
    assert image.config["Cmd"] == ["serve"] and image.config["Entrypoint"] == ["tini", "--", "nxd-infer"]
    assert "8080/tcp" in image.config["ExposedPorts"]
    assert image.environment["NXD_INFER_PORT"] == "8080"


@pytest.fixture(scope="session")
def neuron() -> Iterator[Image]:
    """The other target, on a stand-in of AWS' image: it has torch (another version) and nothing of Neuron."""
    install = "pip install --quiet --no-cache-dir --break-system-packages torch==2.13.0"
    yield from built("neuron", "debian-python-torch", install)


def test_the_steps_of_the_neuron_target(neuron: Image):
    with Container(neuron, ("--version",)) as container:
        assert container.wait(120) == 0 and container.log.strip() == "0.1.0"
    assert neuron.environment["NXD_INFER_TRACE_OPTIONS"] == "--backend neuron"
    where = "import json, torch, nxd_infer; print(json.dumps([torch.__file__, nxd_infer.__file__]))"
    command = ["chroot", str(neuron.root), "/opt/venv/bin/python", "-c", where]
    torch, ours = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert torch.startswith("/usr/") and ours.startswith("/opt/venv/")  # the base's own torch was not replaced
