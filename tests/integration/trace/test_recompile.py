"""An artifact's own graphs, compiled again: the same digests and numbers as a trace, and nothing else changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nxd_infer as nxd
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.backends import registry
from nxd_infer.errors import ArtifactCorruptError, ArtifactError, ArtifactVersionError, TraceConfigError
from nxd_infer.runtime.load import load_artifact
from tests.support import toy_artifacts as toy
from tests.support import traced_models as models
from tests.support.backends import small_traces
from tests.support.backends.manifests import changed
from tests.support.backends.plugins import installed

recompile = nxd.trace.parallel_model_recompile


@pytest.fixture(autouse=True)
def lockstep() -> Iterator[None]:
    """The backend of another package."""
    with installed():
        yield


def answers(path: Path) -> list[torch.Tensor]:
    """Three calls: the model keeps a state."""
    with nxd.trace.parallel_model_load(path) as model:
        return [model(*models.inputs())[0] for _ in range(3)]


def every_file(path: Path) -> dict[str, str]:
    """The hash of each file but the manifest."""
    return {name: spec.blake3 for name, spec in load_artifact(path, runs_here=False).manifest.files.items()}


def test_every_way_gives_the_files_of_a_trace(tmp_path: Path) -> None:
    traced, lockstep, back = small_traces.net(), tmp_path / "lockstep", tmp_path / "back"
    with small_traces.cache_at(tmp_path / "cache"):
        assert recompile(traced, lockstep, backend="lockstep")["compiled"] == 1
        expected = models.expected([models.inputs()] * 3)
        assert all(
            (a - b).abs().max() <= 1e-5 * b.abs().max() for a, b in zip(answers(lockstep), expected, strict=True)
        )
        assert recompile(lockstep, back, backend="cpu")["compiled"] == 0
        assert every_file(back) == every_file(traced), "bit for bit: weights, operators and extra files are taken over"
        assert load_artifact(back).manifest.buckets == load_artifact(traced).manifest.buckets
        assert recompile(lockstep, lockstep)["cached"] == 1, "in its own place"


def test_what_cannot_be_recompiled_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = toy.build(tmp_path / "toy", degree=2)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    for arguments, error, message in (
        ({"backend": "tpu"}, TraceConfigError, "there is no backend 'tpu'"),
        ({"compiler_args": "cpu_target=x86-64-v3"}, TraceConfigError, "takes no compiler_args"),
    ):
        with pytest.raises(error, match=message):
            recompile(path, tmp_path / "out", **arguments)
    with pytest.raises(ArtifactError, match="not an artifact"):
        recompile(path, mine)
    with pytest.raises(ArtifactError, match="no such directory"):
        recompile(tmp_path / "nothing", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "toy"]


def test_code_for_another_cpu_is_refused_by_loading_and_taken_by_recompiling(tmp_path: Path) -> None:
    def foreign(manifest):
        manifest.target["arch"] = "s390x"

    path = toy.build(tmp_path / "toy", degree=1, change=foreign)
    with pytest.raises(ArtifactVersionError, match=r"compiled for s390x and .*: use `nxd-infer recompile` here"):
        load_artifact(path)
    recompile(path, tmp_path / "here")
    with nxd.trace.parallel_model_load(tmp_path / "here") as model:
        x = torch.randn(2, 4, toy.HIDDEN)
        assert torch.allclose(model(x)["y"], toy.expected(toy.logical_weights(), x), atol=1e-5)


def test_another_compiler_compiles_again_and_makes_another_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = registry.get("lockstep")
    compiler = backend.compiler()

    def again(name: str, count: int) -> LoadedArtifact:
        report = recompile(small_traces.net(), tmp_path / name, backend="lockstep")
        assert (report["compiled"], report["cached"]) == (count, 1 - count)
        return load_artifact(tmp_path / name)

    with small_traces.cache_at(tmp_path / "cache"):
        first = again("first", 1)
        assert again("same", 0).digest == first.digest and first.manifest.versions["compiler"] == compiler
        monkeypatch.setattr(backend, "compiler", lambda: f"{compiler}.1")
        newer = again("newer", 1)
    assert newer.manifest.versions["compiler"] == f"{compiler}.1" and newer.digest != first.digest
    assert newer.manifest.graphs.keys() == first.manifest.graphs.keys()
    with changed(first.path) as manifest:
        manifest["versions"]["compiler"] = "another"
    with pytest.raises(ArtifactCorruptError, match="was replaced"):
        first.verify_again(0)
