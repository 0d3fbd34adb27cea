"""What of an artifact is code, and can be refused; nothing is opened that its manifest does not list."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from nxd_infer.artifact.manifest import MANIFEST_NAME, weight_name
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.errors import ArtifactCorruptError, ArtifactError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import parallel_model_load
from tests.support import toy_artifacts as toy


class Payload:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def kernel(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    return tensors, torch.tensor([0])


def test_a_bucket_kernel_is_code_and_can_be_refused(tmp_path):
    source = toy.build(tmp_path / "good", degree=1, kernel=kernel)
    with pytest.raises(ArtifactError, match=r"bucket_kernel\.pt, which is code, .*allow_kernel=False.* if you trust"):
        parallel_model_load(source, allow_kernel=False)
    parallel_model_load(source).close()


@pytest.mark.parametrize(("writer", "name"), [("pickle", weight_name(0)), ("torch", "bucket_kernel.pt")])
def test_a_pickle_in_place_of_a_file_is_never_executed(tmp_path, writer, name):
    """Even when the manifest vouches for it: its checksums are right."""
    marker = tmp_path / "executed"
    source = toy.build(tmp_path / "good", degree=1, kernel=kernel)
    good = load_artifact(source)
    hostile = tmp_path / "payload"
    if writer == "pickle":
        hostile.write_bytes(pickle.dumps(Payload(marker)))
    else:
        torch.save(Payload(marker), hostile)
    with ArtifactWriter(tmp_path / "bad") as out:
        for file in good.manifest.files:
            out.add(file, hostile if file == name else source / file)
        out.commit(good.manifest.model_copy(deep=True))
    with pytest.raises(ArtifactCorruptError, match=r"not a safetensors file|not a TorchScript bucket kernel"):
        parallel_model_load(tmp_path / "bad").start()
    assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))  # the payload does act where pickles are loaded
    assert marker.exists()


def test_only_what_is_listed_is_opened(artifact, caplog):
    """By the names of the manifest alone: nothing else is covered by the digest."""
    (artifact / "ops").mkdir(exist_ok=True)
    for name in ("chat_template.jinja", "ops/abc.so", "weights/rank_99.safetensors"):
        (artifact / name).write_text("x")
    loaded = load_artifact(artifact)
    assert loaded.find("chat_template.jinja") is None and loaded.find("nothing") is None
    assert loaded.find("chat_template.jinja") is None
    (warning,) = caplog.messages  # once
    assert str(artifact / "chat_template.jinja") in warning and "ignored" in warning and "does not list" in warning
    assert loaded.find(weight_name(1)) == loaded.weight_file(1) == artifact / weight_name(1)
    assert [path.name for path in loaded.find_in("weights")] == ["rank_00.safetensors", "rank_01.safetensors"]
    assert loaded.find_in("nowhere") == []
    for open_it in (lambda: loaded.op_file("abc"), lambda: loaded.weight_file(99)):
        with pytest.raises(ArtifactCorruptError, match="does not list the file"):
            open_it()


@pytest.mark.parametrize("name", ["more.so", "other/model.so", "link"])
def test_a_folder_of_a_graph_holds_nothing_else(artifact, name):
    """What loads a compiled graph takes a folder as a whole."""
    loaded = load_artifact(artifact)
    digest = next(iter(loaded.manifest.graphs))
    assert loaded.graph_dir(digest).is_dir()
    place = artifact / "graphs" / digest / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to("/tmp") if name == "link" else place.write_bytes(b"")
    with pytest.raises(ArtifactCorruptError, match=rf"{name} is not listed .* remove that file"):
        load_artifact(artifact).graph_dir(digest)


def test_a_manifest_that_is_nested_deeply(artifact):
    """Code that recurses at each level may fail."""
    text = json.dumps({**json.loads((artifact / MANIFEST_NAME).read_text()), "metadata": {}})
    for levels in (201, 60_000):
        nested = "[" * levels + "]" * levels
        (artifact / MANIFEST_NAME).write_text(text.replace('"metadata": {}', f'"metadata": {{"a": {nested}}}', 1))
        with pytest.raises(ArtifactCorruptError, match="is not JSON"):
            load_artifact(artifact)
