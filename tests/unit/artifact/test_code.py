"""What of an artifact is code: a bucket kernel, which can be refused. A pickle is never run."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from nxd_infer.artifact.names import weight_name
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.errors import (
    ArtifactCorruptError,
    ArtifactError,
)
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.save_load import parallel_model_load
from tests.support import toy_artifacts as toy


class Payload:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def kernel(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    return tensors, torch.tensor([0])


def another(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    return tensors, torch.tensor([1])


def test_a_bucket_kernel_is_code_and_can_be_refused(tmp_path):
    source = toy.build(tmp_path / "good", degree=1, kernel=kernel)
    with pytest.raises(ArtifactError, match=r"bucket_kernel\.pt, which is code, .*allow_kernel=False.* if you trust"):
        parallel_model_load(source, allow_kernel=False)
    parallel_model_load(source).close()


def test_the_digest_covers_the_bucket_kernel(tmp_path):
    one, other = (toy.build(tmp_path / k.__name__, degree=1, kernel=k) for k in (kernel, another))
    digest = load_artifact(one).digest
    assert digest != load_artifact(other).digest
    with pytest.raises(ArtifactCorruptError, match="expected"):
        load_artifact(other, expect_digest=digest)
    shutil.copyfile(other / "bucket_kernel.pt", one / "bucket_kernel.pt")
    with pytest.raises(ArtifactCorruptError, match=r"bucket_kernel\.pt"):
        load_artifact(one, expect_digest=digest)


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
