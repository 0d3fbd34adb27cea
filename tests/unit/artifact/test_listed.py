"""Of an artifact nothing is opened that its manifest does not list; a manifest may be nested only so deeply."""

from __future__ import annotations

import contextlib
import json

import pytest

from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.artifact.names import weight_name
from nxd_infer.artifact.writer import CHECKSUM_KEY, manifest_checksum
from nxd_infer.errors import ArtifactCorruptError
from nxd_infer.runtime.load import load_artifact


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


@pytest.mark.parametrize("name", ["more.so", "inductor/data/aotinductor/other/model.wrapper.so", "link"])
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
    """At 900 levels JSON is still parsed, but code that recurses at each level fails."""
    manifest = json.loads((artifact / MANIFEST_NAME).read_text())
    for levels in (900, 101, 60_000):
        nested = "[" * levels + '"y"' + "]" * levels
        for field in ('"structure"', '"metadata"'):
            text = json.dumps({**manifest, "metadata": {}, "buckets": [{**manifest["buckets"][0], "structure": None}]})
            place = f"{field}: null" if field == '"structure"' else f"{field}: {{}}"
            assert place in text
            value = nested if field == '"structure"' else f'{{"a": {nested}}}'
            text = text.replace(place, f"{field}: {value}", 1)
            with contextlib.suppress(RecursionError):  # a foreign writer makes the checksum right again
                fields = json.loads(text)
                text = json.dumps({**fields, CHECKSUM_KEY: manifest_checksum(fields)})
            (artifact / MANIFEST_NAME).write_text(text)
            with pytest.raises(ArtifactCorruptError, match=r"levels deep|is not JSON"):
                load_artifact(artifact)
