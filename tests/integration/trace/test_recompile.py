"""An artifact's own graphs, compiled again: the same digests and numbers as a trace, and nothing else changed."""

from __future__ import annotations

import pytest
import torch

import nxd_infer as nxd
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.backends import registry
from nxd_infer.errors import ArtifactCorruptError, ArtifactError, ArtifactVersionError, TraceConfigError, TraceError
from nxd_infer.runtime.load import load_artifact
from tests.support import toy_artifacts as toy
from tests.support import traced_models as models
from tests.support.backends.manifests import changed
from tests.support.backends.plugins import installed
from tests.support.needs import needs_inductor

recompile = nxd.trace.parallel_model_recompile
pytestmark = pytest.mark.usefixtures("own_cache")


def trace(path, backend, **more):
    arguments = {
        **more,
        "tp_degree": 2,
        "inline_weights_to_neff": False,
        "checkpoint_loader_callable": models.state_dict,
    }
    model = nxd.trace.parallel_model_trace(models.net, models.inputs(), backend=backend, artifact_dir=path, **arguments)
    model.close()
    return model


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    path = tmp_path_factory.mktemp("recompile") / "eager"
    trace(path, "eager")
    return path


def answers(path) -> list[torch.Tensor]:
    """Three calls: the model keeps a state."""
    with nxd.trace.parallel_model_load(path) as model:
        return [model(*models.inputs())[0] for _ in range(3)]


def every_file(path) -> dict[str, str]:
    """The hash of each file but the manifest."""
    return {name: spec.checksum for name, spec in load_artifact(path, runs_here=False).manifest.files.items()}


def outside_graphs(path) -> dict[str, str]:
    return {name: digest for name, digest in every_file(path).items() if not name.startswith("graphs/")}


@needs_inductor
def test_every_way_gives_the_numbers_of_a_trace(eager, tmp_path):
    there = tmp_path / "there"
    report = recompile(eager, there, backend="inductor")
    assert (report["graphs"], report["compiled"], report["cached"]) == (1, 1, 0)
    assert outside_graphs(there) == outside_graphs(eager), "weights, operators and extra files are taken over"
    traced = trace(tmp_path / "traced", "inductor")
    assert traced.trace_report["compiled"] == 0, "the same digest as a trace from the model's code"
    assert load_artifact(there).manifest.graphs == traced.manifest.graphs
    assert every_file(there) == every_file(tmp_path / "traced"), "the same files give the same numbers"
    want, compiled = answers(eager), answers(there)
    assert all((a - b).abs().max() <= 1e-5 * b.abs().max() for a, b in zip(compiled, want, strict=True))

    report = recompile(there, tmp_path / "again")
    assert (report["compiled"], report["cached"]) == (0, 1)
    assert every_file(tmp_path / "again") == every_file(there), "the same target: bit for bit"
    assert recompile(there, tmp_path / "back", backend="eager")["compiled"] == 0
    assert every_file(tmp_path / "back") == every_file(eager), "likewise"
    assert load_artifact(tmp_path / "back").manifest.buckets == load_artifact(eager).manifest.buckets

    report = recompile(there, there, compiler_args={"cpu_target": "x86-64-v2"})  # in its own place
    assert report["compiled"] == 1
    manifest = load_artifact(there).manifest
    assert manifest.target["march"] == "x86-64-v2" and "avx2" not in manifest.target["cpu_features"]
    assert all((a - b).abs().max() <= 1e-5 * b.abs().max() for a, b in zip(answers(there), want, strict=True))


@needs_inductor
def test_a_compiler_that_fails_leaves_nothing(eager, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", "0")  # else what was compiled before is taken
    with pytest.raises(TraceError, match="compiling graph"):
        recompile(eager, tmp_path / "out", backend="inductor")
    monkeypatch.delenv("CXX")
    late = {"backend": "inductor", "compile_timeout": 0.01}
    for made in (lambda: recompile(eager, tmp_path / "out", **late), lambda: trace(tmp_path / "out", **late)):
        with pytest.raises(TraceError, match=r"longer than 0.01 s; raise compile_timeout"):
            made()
    assert list(tmp_path.iterdir()) == []


@needs_inductor
def test_what_cannot_be_recompiled_is_refused_before_anything_is_written(tmp_path):
    path = toy.build(tmp_path / "toy", degree=2)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    for arguments, error, message in (
        ({"backend": "tpu"}, TraceConfigError, "there is no backend 'tpu'"),
        ({"compiler_args": "cpu_target=x86-64-v3"}, TraceConfigError, "takes no compiler_args"),
        ({"backend": "inductor", "compiler_args": {"cpu_target": "z80"}}, TraceConfigError, "no cpu_target 'z80'"),
    ):
        with pytest.raises(error, match=message):
            recompile(path, tmp_path / "out", **arguments)
    with pytest.raises(ArtifactError, match="not an artifact"):
        recompile(path, mine)
    with pytest.raises(ArtifactError, match="no such directory"):
        recompile(tmp_path / "nothing", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "toy"]


def test_code_for_another_cpu_is_refused_by_loading_and_taken_by_recompiling(tmp_path):
    def foreign(manifest):
        manifest.target["cpu_features"] = ["avx1024"]

    path = toy.build(tmp_path / "toy", degree=1, change=foreign)
    with pytest.raises(ArtifactVersionError, match="avx1024, which this one lacks: use `nxd-infer recompile`"):
        load_artifact(path)
    recompile(path, tmp_path / "here")
    with nxd.trace.parallel_model_load(tmp_path / "here") as model:
        x = torch.randn(2, 4, toy.HIDDEN)
        assert torch.allclose(model(x)["y"], toy.expected(toy.logical_weights(), x), atol=1e-5)


@pytest.fixture
def lockstep():
    """The backend of another package."""
    with installed():
        yield registry.get("lockstep")


def test_a_changed_compiler_or_file_is_another_graph_and_another_artifact(tmp_path, monkeypatch, lockstep):
    """For the cache of compiled graphs, and for what an artifact says of itself."""
    first, backend = tmp_path / "first", lockstep
    arguments = {"backend": "lockstep", "checkpoint_loader_callable": models.state_dict, "artifact_dir": first}
    with nxd.trace.parallel_model_trace(models.net, models.inputs(), inline_weights_to_neff=False, **arguments):
        pass
    made = [load_artifact(first)]
    (graph,) = made[0].manifest.graphs

    def again(compiled: int) -> LoadedArtifact:
        out = tmp_path / f"{len(made)}"
        report = recompile(first, out)
        assert (report["compiled"], report["cached"]) == (compiled, 1 - compiled)
        made.append(load_artifact(out))
        return made[-1]

    assert again(0).digest == made[0].digest
    passes, compiler = backend.passes, backend.compiler()
    assert made[0].manifest.versions["compiler"] == compiler

    monkeypatch.setattr(backend, "compiler", lambda: f"{compiler}.1")
    newer = again(1)
    assert newer.manifest.versions["compiler"] == f"{compiler}.1" and list(newer.manifest.graphs) == [graph]
    assert again(0).digest == newer.digest != made[0].digest

    for text in ("one", "two"):

        def lowered(graphs, options, text=text):
            found = passes(graphs, options)
            for one in found:
                one.files["beside.txt"] = text
            return found

        monkeypatch.setattr(backend, "passes", lowered)
        assert again(1).digest == again(0).digest
    assert len({one.digest for one in made}) == 4
    assert len({name for one in made for name in one.manifest.graphs}) == 3

    with changed(made[-1].path) as manifest:  # neither is changed unseen
        manifest["versions"]["compiler"] = "another"
    with pytest.raises(ArtifactCorruptError, match="was replaced"):
        made[-1].verify_again(0)
    beside = next(made[-2].path.glob("graphs/*/beside.txt"))
    beside.unlink()  # which the cache may share
    beside.write_text("six")
    with pytest.raises(ArtifactCorruptError, match=r"beside\.txt"):
        made[-2].verify()
