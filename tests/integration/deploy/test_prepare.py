"""What `serve` makes an artifact of: a model directory, traced once, and a folder of a store, fetched once."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_infer.artifact.reader import read_artifact
from nxd_infer.errors import ArtifactCorruptError, ArtifactError, ArtifactSpaceError, CheckpointError
from nxd_server.app.prepare import prepare
from nxd_server.errors import SettingsError
from nxd_server.settings import ServerSettings
from tests.support.checkpoint.s3_server import s3_server
from tests.support.http.http_artifacts import ONE_LAYER
from tests.support.http.http_servers import ServerProcess, wait_for
from tests.support.tiny_models import write_tiny

TRACE = "--backend eager --dtype float32 --batch-sizes 1 --prompt-buckets 16 --max-len 64"
SERVE = [sys.executable, "-m", "nxd_infer.cli.main", "serve"]
PREPARE = (
    "import logging, sys\nfrom nxd_infer.cli import stop\nstop.install()\n"
    "logging.basicConfig(level=logging.INFO)\n"
    "from nxd_server.app.prepare import prepare\nfrom nxd_server.settings import ServerSettings\n"
    "print('PATH', prepare(sys.argv[1], ServerSettings(keep=sys.argv[2], trace_options=sys.argv[3])))\n"
    "assert 'torch' not in sys.modules\n"
)


def settings(keep: Path, **more: object) -> ServerSettings:
    return ServerSettings.resolve(keep=keep, trace_options=TRACE, **more)


def started(*words: object) -> subprocess.Popen[str]:
    """A program of this interpreter, in a session of its own."""
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("models") / "tiny llama", **ONE_LAYER)


@pytest.fixture(scope="module")
def traced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """The directory that two servers share which start at once, what it holds then, and what each printed."""
    keep = tmp_path_factory.mktemp("keep") / "below"
    processes = [started("-c", PREPARE, model, keep, TRACE) for _ in range(2)]
    told = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    paths = {line.removeprefix("PATH ") for out, _ in told for line in out.splitlines() if line.startswith("PATH ")}
    assert len(paths) == 1, told
    return keep, Path(paths.pop()), [log for _, log in told]


def test_of_two_servers_one_traces_and_the_other_finds_it(traced, model: Path):
    keep, artifact, logs = traced
    told = "is a model, not an artifact: it is traced first (nxd-infer trace --backend eager"
    assert sorted(told in log for log in logs) == [False, True], logs
    assert artifact.parent == keep and artifact.name.startswith("tiny-llama-")
    found = read_artifact(artifact).manifest
    assert found.backend == "cpu" and found.metadata["model_name"] == "tiny llama"
    assert kept(keep) == [artifact.name]


def test_the_next_start_finds_it_and_a_changed_model_is_another(traced, model: Path, tmp_path: Path, monkeypatch):
    keep, artifact, _ = traced
    monkeypatch.setattr("nxd_server.app.prepare._trace", lambda source, out, settings: pytest.fail(str(out)))
    assert prepare(str(model), settings(keep)) == artifact
    (model / "README.md").write_text("no part of it")
    (model / ".cache").mkdir(exist_ok=True)
    (model / ".cache/lock.json").write_text("{}")
    assert prepare(str(model), settings(keep)) == artifact
    made: list[Path] = []
    monkeypatch.setattr("nxd_server.app.prepare._trace", lambda source, out, settings: made.append(out))
    other = tmp_path / "tiny llama"
    shutil.copytree(model, other, copy_function=shutil.copy2)
    assert prepare(str(other), settings(keep)) == artifact  # the same files in another place
    os.utime(other / "model.safetensors", ns=(1, 1))
    prepare(str(other), settings(keep))
    prepare(str(model), ServerSettings(keep=keep, trace_options=TRACE + " --tp 2"))
    monkeypatch.setattr("nxd_server.app.prepare.VERSION", "9")
    prepare(str(model), settings(keep))
    assert len({*made, artifact}) == 4


def test_another_compiler_makes_another_artifact(model: Path, tmp_path: Path, monkeypatch):
    """An image of another SDK has the same torch: what its compiler makes may not run on the older one's runtime."""
    compiler, made = tmp_path / "bin/neuronx-cc", []
    compiler.parent.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join([str(compiler.parent), os.environ["PATH"]]))
    monkeypatch.setattr("nxd_server.app.prepare._trace", lambda source, out, settings: made.append(out))
    for option in ("--backend neuron", "--backend=neuron"):
        for version in ("2.26.6360.0", "2.27.5334.0", "2.26.6360.0"):
            compiler.write_text(f"#!/bin/sh\necho NeuronX Compiler version {version}\n")
            compiler.chmod(0o755)
            prepare(str(model), ServerSettings(keep=tmp_path / "keep", trace_options=f"{option} --target inf2"))
    assert made[0] != made[1] and made[0] == made[2] and made[3] != made[4] and made[3] == made[5]


@pytest.mark.smoke
def test_serve_takes_a_model_directory_from_the_environment_as_a_container_does(traced, model: Path):
    keep, _, _ = traced
    variables = {"ARTIFACT": str(model), "KEEP": str(keep), "TRACE_OPTIONS": TRACE, "HOST": "127.0.0.1", "PORT": "0"}
    server = ServerProcess(SERVE, env={f"NXD_INFER_{name}": value for name, value in variables.items()})
    try:
        server.wait_ready()
        assert "was made by an earlier start" in server.log
        answer = server.post("/invocations", {"prompt": "ab", "max_tokens": 3, "temperature": 0})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        assert server.get("/ping").status_code == 200
        assert server.stop() == 0, server.log
    finally:
        server.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_trace_that_is_ended_leaves_nothing_that_a_start_would_find(number, model: Path, tmp_path: Path, monkeypatch):
    """SIGTERM goes to the server alone, as tini sends it, and a kill to all, as the end of a container does."""
    keep, temporary = tmp_path / "keep", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = started("-m", "nxd_infer", "serve", model, "--keep", keep, "--trace-options", TRACE)
    wait_for(lambda: list(keep.glob(".nxd-trace-*")) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if number == signal.SIGKILL:
        process.send_signal(signal.SIGSTOP)  # it is not to see the trace's end before its own
        os.killpg(int(child), signal.SIGKILL)
    process.send_signal(number)
    _, log = process.communicate(timeout=120)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    wait_for(lambda: not Path(f"/proc/{child}").exists(), 30, "the trace goes on")
    if number == signal.SIGTERM:
        assert f"stopped before {model} could be served" in log
        assert kept(keep) == [] and not list(temporary.glob("nxd*"))
    made: list[Path] = []
    monkeypatch.setattr("nxd_server.app.prepare._trace", lambda source, out, settings: made.append(out))
    assert [prepare(str(model), settings(keep))] == made  # traced again


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    pytest.importorskip("s3fs")
    with s3_server() as (endpoint, objects, _):
        keys = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
        for name, value in {"ENDPOINT_URL": endpoint, **keys}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield objects


def put(objects: dict[str, bytes], folder: str, directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            objects[f"{folder}/{path.relative_to(directory).as_posix()}"] = path.read_bytes()


def kept(keep: Path) -> list[str]:
    return sorted(path.name for path in keep.iterdir() if not path.name.endswith(".lock"))


def test_an_artifact_of_a_bucket_is_fetched_whole_and_once(bucket, traced, tmp_path: Path, caplog):
    put(bucket, "models/a b/llama", traced[1])
    bucket["models/a b/llama/stray.json"] = b"{}"
    caplog.set_level(logging.INFO)
    path = prepare("s3://models/a b/llama/", settings(tmp_path))
    assert kept(tmp_path) == [path.name] and path.name.startswith("llama-")
    assert read_artifact(path).digest == read_artifact(traced[1]).digest
    assert not (path / "stray.json").exists()
    fetched = "fetching s3://models/a b/llama"
    assert caplog.text.count(fetched) == 1
    assert prepare("s3://models/a b/llama", settings(tmp_path)) == path and caplog.text.count(fetched) == 1


def test_a_model_of_a_bucket_is_traced_and_its_files_are_not_kept(
    bucket, traced, model: Path, tmp_path: Path, monkeypatch, caplog
):
    put(bucket, "models/llama", model)
    bucket["models/llama/pytorch_model.bin"] = b"the same once more"
    made: list[list[str]] = []

    def trace(source: Path, out: Path, settings: ServerSettings) -> None:
        assert source.name == "llama"  # the artifact's model name
        made.append(kept(source))
        shutil.copytree(traced[1], out)

    monkeypatch.setattr("nxd_server.app.prepare._trace", trace)
    caplog.set_level(logging.INFO)
    path = prepare("s3://models/llama", settings(tmp_path))
    assert kept(tmp_path) == [path.name]
    assert prepare("s3://models/llama", settings(tmp_path)) == path
    files = sorted({path.name for path in model.iterdir()} - {"README.md", ".cache"})
    assert made == [files] and f"fetching s3://models/llama: {len(files)} files" in caplog.text
    bucket["models/llama/generation_config.json"] += b" "  # another ETag
    assert prepare("s3://models/llama", settings(tmp_path)) != path and len(made) == 2


def test_what_is_damaged_in_a_bucket_or_has_no_room_is_refused_and_not_kept(
    bucket, traced, tmp_path: Path, monkeypatch
):
    put(bucket, "models/llama", traced[1])
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(ArtifactSpaceError, match=r"s3://models/llama has .* has room for 1000 B: .*NXD_INFER_KEEP"):
            prepare("s3://models/llama", settings(tmp_path))
    name = "models/llama/weights/rank_00.safetensors"
    data = bucket[name]
    bucket[name] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(ArtifactCorruptError, match=r"weights/rank_00.safetensors"):
        prepare("s3://models/llama", settings(tmp_path))
    del bucket[name]
    with pytest.raises(ArtifactError, match=r"s3://models/llama lacks weights/rank_00.safetensors.*copy the artifact"):
        prepare("s3://models/llama", settings(tmp_path))
    bucket["models/llama/manifest.json"] = b"[]"
    with pytest.raises(ArtifactError, match=r"manifest.json is damaged: it lists no files"):
        prepare("s3://models/llama", settings(tmp_path))
    bucket["models/llama/manifest.json"] = json.dumps({"files": {"../../etc/x": {}}}).encode()
    with pytest.raises(ArtifactCorruptError, match="not a path inside an artifact"):
        prepare("s3://models/llama", settings(tmp_path))
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        ("s3://models/other", ArtifactError, "is neither an artifact, which has a manifest.json, nor"),
        ("s3://models/nothing", ArtifactError, "s3://models/nothing holds no files"),
        ("nowhere://a", CheckpointError, "nowhere://a: Protocol not known"),
        ("s3://", CheckpointError, "'s3://' names no bucket; give s3://bucket/prefix"),
        ("s3://forbidden", CheckpointError, "s3://forbidden"),
    ],
)
def test_what_is_no_model_is_named(bucket, tmp_path: Path, given, kind, told):
    bucket.update({"models/other/readme.txt": b"x", "forbidden/manifest.json": b"{}"})
    with pytest.raises(kind, match=told):
        prepare(given, settings(tmp_path))


def test_a_trace_that_fails_says_where_its_options_come_from(model: Path, tmp_path: Path, capfd):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cannot be kept in .*file: .*user \d+ may write.*NXD_INFER_KEEP"):
        prepare(str(model), settings(tmp_path / "file"))
    with pytest.raises(SettingsError, match=r"ended with status 2.*NXD_INFER_TRACE_OPTIONS\), now '--tq 2'"):
        prepare(str(model), ServerSettings(keep=tmp_path, trace_options="--tq 2"))
    assert "No such option: --tq" in capfd.readouterr().err
    with pytest.raises(SettingsError, match=r"trace_options: cannot be split into options: No closing quotation"):
        ServerSettings.resolve(trace_options="--tp '2")


def test_a_trace_and_a_wait_are_bounded(model: Path, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"took more than 0.2 s: raise --prepare-timeout"):
        prepare(str(model), settings(tmp_path, prepare_timeout=0.2))
    (lock,) = tmp_path.glob(".*.lock")
    held = subprocess.Popen(["flock", str(lock), "sleep", "600"], start_new_session=True)
    try:
        wait_for(lambda: subprocess.run(["flock", "-n", str(lock), "true"]).returncode != 0, 30, "")
        with pytest.raises(SettingsError, match=r"another server still makes .* after 0.2 s: end it, or raise"):
            prepare(str(model), settings(tmp_path, prepare_timeout=0.2))
    finally:
        os.killpg(held.pid, signal.SIGKILL)
        held.wait()


def test_a_directory_of_an_artifact_is_served_where_it_lies(traced, tmp_path: Path):
    _, artifact, _ = traced
    assert prepare(str(artifact), settings(tmp_path)) == artifact
    assert prepare(f"file://{artifact}", settings(tmp_path)) == artifact
    with pytest.raises(ArtifactError, match=r"none is missing: give an artifact .* or a GGUF file"):
        prepare(str(tmp_path / "none"), settings(tmp_path))
    assert list(tmp_path.iterdir()) == []
