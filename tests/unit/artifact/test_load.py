"""Loading an artifact: verified, or refused by name with a typed error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from nxd_infer.artifact.manifest import MANIFEST_NAME, FileSpec, weight_name
from nxd_infer.artifact.reader import artifact_digest
from nxd_infer.errors import ArtifactBackendError, ArtifactCorruptError, ArtifactError, ArtifactVersionError
from nxd_infer.runtime.load import load_artifact
from tests.support import toy_artifacts as toy
from tests.support.backends.manifests import changed


def edit(artifact: Path, **fields) -> None:
    """Change fields of the manifest and make its own checksum right again, as a foreign writer would."""
    with changed(artifact) as manifest:
        manifest.update(fields)


def test_what_is_no_artifact(tmp_path):
    with pytest.raises(ArtifactError, match="no such directory"):
        load_artifact(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"it has no manifest\.json"):
        load_artifact(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="not an artifact"):
        load_artifact(tmp_path / "file")


def test_every_file_missing_truncated_or_flipped_is_named(artifact):
    for name in load_artifact(artifact).manifest.files:
        path = artifact / name
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(ArtifactCorruptError, match=f"lacks its file {name}"):
            load_artifact(artifact)
        path.write_bytes(data[:-1])
        for verify in (True, False):
            with pytest.raises(ArtifactCorruptError, match=f"{name} .*is truncated"):
                load_artifact(artifact, verify=verify)
        path.write_bytes(data + b"x")
        with pytest.raises(ArtifactCorruptError, match=f"{name} .*is altered"):
            load_artifact(artifact, verify=False)
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
        with pytest.raises(ArtifactCorruptError, match=f"{name} .*is altered"):
            load_artifact(artifact)
        path.write_bytes(data)
    load_artifact(artifact)


def test_every_flipped_byte_of_the_manifest_is_refused(artifact):
    path = artifact / MANIFEST_NAME
    data = path.read_bytes()
    for place in range(0, len(data), 37):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        path.write_bytes(changed)
        try:
            same = json.loads(changed) == json.loads(data)  # white space
        except ValueError:
            same = False
        if not same:
            with pytest.raises(ArtifactError):
                load_artifact(artifact)
    for damaged in (b"", b"{", b"[]", b"null", data[:-40], b"\xff" * 10, b"[" * 100_000):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactCorruptError, match=r"manifest\.json is damaged"):
            load_artifact(artifact)


def test_other_versions(artifact):
    manifest = json.loads((artifact / MANIFEST_NAME).read_text())
    major, minor = torch.__version__.split(".")[:2]
    for fields, text in [
        ({"format": "2.7", "from_the_future": {"a": 1}}, ""),
        ({"format": "3.0"}, r"has format 3\.0; this package reads 2\.x"),
        ({"requires": ["bucket-kernel", "time-travel"]}, "requires time-travel"),
        ({"versions": {"torch": f"{major}.{minor}.99+cu"}}, ""),
        ({"versions": {"torch": "2.4.1+cpu"}}, "compiled with torch"),
        ({"versions": {"torch": ""}}, "compiled with torch"),
        ({"target": {**manifest["target"], "arch": "s390x"}}, "compiled for s390x"),
    ]:
        edit(artifact, **{**manifest, **fields})
        with pytest.raises(ArtifactVersionError, match=text) if text else contextlib.nullcontext():
            load_artifact(artifact)


def test_other_backends(artifact):
    with pytest.raises(ArtifactBackendError, match="traced for the backend 'eager', not 'xla'"):
        load_artifact(artifact, backend="xla")
    load_artifact(artifact, backend="eager")
    edit(artifact, backend="abacus")
    with pytest.raises(ArtifactBackendError, match=r"needs the backend .abacus.*there is no backend"):
        load_artifact(artifact)


def test_a_manifest_that_does_not_hold_together(artifact):
    manifest = json.loads((artifact / MANIFEST_NAME).read_text())
    files, (first, *others) = manifest["files"], manifest["weights"]
    weight = weight_name(1)
    for fields, text in [
        ({"tp_degree": 3, "layout": {}}, "has 2 graphs for 3 ranks"),
        ({"buckets": [{**manifest["buckets"][0], "structure": "z"}]}, "output 'z' of bucket"),
        ({"layout": {"weights": {"table": {"logical": {"table": 3}, "ranks": [{}, {}]}}}}, "what 'table' is made of"),
        ({"tp_degree": 0, "layout": {}}, "tp degree 0"),
        ({"layout": {"unread": 3}}, "'unread' is not a list"),
        ({"buckets": []}, "0 buckets"),
        ({"buckets": [manifest["buckets"][0]] * 2}, "bucket 'b2_s4' twice"),
        ({"graphs": {}}, "of bucket 'b2_s4'"),
        ({"states": []}, "state 'count'"),
        ({"files": {k: v for k, v in files.items() if k != weight}}, f"file {weight} is not listed"),
        ({"ops": ["abc"]}, "file ops/abc.so is not listed"),
        ({"requires": ["bucket-kernel"]}, "bucket_kernel.pt is not listed"),
        ({"tp_degree": "two"}, "tp_degree"),
        ({"weights": [{**first, "dtype": "float33"}, *others]}, r"weights\.0: .*'float33' is not a torch dtype"),
        ({"weights": [{**first, "stride": []}, *others]}, r"weights\.0: .*no tensor has the shape \[8, 8\] with"),
        ({"weights": [{**first, "shape": [-4], "stride": [1]}, *others]}, r"no tensor has the shape \[-4\] with"),
    ]:
        edit(artifact, **{**manifest, **fields})
        with pytest.raises(ArtifactCorruptError, match=text):
            load_artifact(artifact)


def test_a_key_that_stands_twice_and_half_a_character_are_refused(artifact):
    path = artifact / MANIFEST_NAME
    text = path.read_text()
    path.write_text(text.replace('"target": {', '"target": {"\\ud800": 1, ', 1))
    with pytest.raises(ArtifactCorruptError, match=r"not JSON .*hex escape"):
        load_artifact(artifact)
    for place in ("{", '"files": {'):
        path.write_text(text.replace(place, f'{place}"tp_degree": 1, "tp_degree": 2, ', 1))
        with pytest.raises(ArtifactCorruptError, match="the key 'tp_degree' stands twice"):
            load_artifact(artifact)


def test_paths_that_lead_out_are_refused(artifact, tmp_path):
    manifest = json.loads((artifact / MANIFEST_NAME).read_text())
    secret = tmp_path / "secret"
    secret.write_text("key")
    spec = FileSpec(size=3, blake3="0" * 64).model_dump()
    for name in ("../secret", str(secret), "weights/../../secret", "a\\b", "weights//x", ""):
        edit(artifact, files={**manifest["files"], name: spec})
        with pytest.raises(ArtifactCorruptError, match="not a path inside an artifact"):
            load_artifact(artifact)
    edit(artifact, **manifest)
    weights = artifact / weight_name(0)
    shutil.move(weights, tmp_path / "moved")
    weights.symlink_to(tmp_path / "moved")  # as in a folder of huggingface_hub
    load_artifact(artifact)
    weights.unlink()
    os.mkfifo(weights)  # which must not block
    with pytest.raises(ArtifactCorruptError, match="not a regular file"):
        load_artifact(artifact)


def test_weights_that_are_not_those_of_the_manifest(tmp_path):
    def other_shape(manifest):
        manifest.weights[0].shape = [1, 2]

    path = toy.build(tmp_path / "a", change=other_shape)
    with pytest.raises(ArtifactCorruptError, match=r"rank_00.*'up' is F32\[8, 8\], recorded float32\[1, 2\]"):
        load_artifact(path)

    def other_name(manifest):
        manifest.weights[0].name = "gone"
        manifest.graphs = {k: g.model_copy(update={"weights": ["gone"]}) for k, g in manifest.graphs.items()}

    path = toy.build(tmp_path / "b", change=other_name)
    with pytest.raises(ArtifactCorruptError, match="lacks the weight 'gone'"):
        load_artifact(path)


def test_a_digest_pins_an_artifact(artifact, original):
    digest = artifact_digest(original)
    assert load_artifact(artifact, expect_digest=digest).digest == digest
    load_artifact(artifact, expect_digest=f"sha256:{digest.upper()}")
    with pytest.raises(ArtifactCorruptError, match="it is another one"):
        load_artifact(artifact, expect_digest="0" * 64)
    weights = artifact / weight_name(0)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    load_artifact(artifact, verify=False)
    with pytest.raises(ArtifactCorruptError, match="is altered"):
        load_artifact(artifact, verify=False, expect_digest=digest)  # a pinned artifact is always verified


def test_numbers_that_json_lacks_come_back(tmp_path):
    """A mask is padded with minus infinity."""

    def change(manifest):
        for bucket in manifest.buckets:
            bucket.inputs[0].pad = {0: float("-inf"), 1: float("nan")}
            bucket.inputs[0].default = float("inf")

    manifest = load_artifact(toy.build(tmp_path / "artifact", change=change)).manifest
    x = manifest.buckets[0].inputs[0]
    assert x.pad[0] == float("-inf") and math.isnan(x.pad[1]) and x.default == float("inf")
    json.loads((tmp_path / "artifact" / MANIFEST_NAME).read_text(), parse_constant=pytest.fail)
