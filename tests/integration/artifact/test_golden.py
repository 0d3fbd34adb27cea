"""Artifacts written by earlier versions of this package still load and compute what they did.

``golden/format_1_0``, ``format_1_1`` and ``format_1_1_blake3`` were written once, by ``toy.build(..., degree=2,
buckets=BUCKETS[:1])`` of their time, and never again. A change that breaks these tests breaks every artifact there is:
raise the format's major version instead.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.artifact.writer import CHECKSUM_KEY, manifest_checksum
from nxd_infer.errors import BackendUnavailableError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.trace.recompile import parallel_model_recompile
from nxd_infer.util.machine import architecture
from tests.support import toy_artifacts as toy
from tests.support.backends.manifests import changed
from tests.support.backends.plugins import installed

GOLDEN = Path(__file__).parent / "golden"
FORMATS = ["1_0", "1_1", "1_1_blake3"]


@pytest.fixture(params=FORMATS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The stored artifact, told that it was written by the torch and on the machine of today."""
    path = Path(shutil.copytree(GOLDEN / f"format_{request.param}", tmp_path / "golden"))
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    assert manifest[CHECKSUM_KEY] == manifest_checksum(manifest)  # the stored one is whole
    assert manifest["format"] == request.param[:3].replace("_", ".")
    with changed(path) as manifest:
        manifest["versions"]["torch"] = torch.__version__
        manifest["target"]["arch"] = architecture()
    return path


def test_it_loads_and_computes_what_it_did(golden: Path):
    artifact = load_artifact(golden)
    assert artifact.manifest.tp_degree == 2
    assert artifact.manifest.backend == "eager"
    assert [spec.default for spec in artifact.manifest.buckets[0].inputs] == [None, 0.0]
    check(golden)


def check(path: Path) -> None:
    with TensorParallelModel(str(path), call_timeout=60, start_timeout=600) as model:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 3, toy.HIDDEN, generator=generator)
        out = model(x, torch.tensor([1, 2]))
        weights = model_weights(path)
        assert torch.allclose(out["y"], toy.expected(weights, x, torch.tensor([1, 2])), rtol=1e-5, atol=1e-5)
        assert out["count"].item() == 1
        assert out["memory"].tolist() == [2.0, 3.0, 4.0]
        model.update_weights(toy.logical_weights(9))
        assert torch.allclose(model(x)["y"], toy.expected(toy.logical_weights(9), x), rtol=1e-5, atol=1e-5)


def test_it_is_compiled_again(golden: Path, tmp_path: Path):
    """A canonical graph goes to any backend; what format 1.0 stored, to those that take what the CPU's passes made."""
    with installed():
        if load_artifact(golden).manifest.format == "1.0":
            said = "were stored by an earlier version, in a form that the lockstep backend does not take"
            with pytest.raises(BackendUnavailableError, match=said):
                parallel_model_recompile(golden, tmp_path / "again", backend="lockstep")
            assert not (tmp_path / "again").exists()
        parallel_model_recompile(golden, tmp_path / "again", backend="eager")
        check(tmp_path / "again")


def model_weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    ranks = [load_file(path / f"weights/rank_{rank:02d}.safetensors") for rank in range(2)]
    return {
        "up": torch.cat([rank["up"] for rank in ranks], 1),
        "down": torch.cat([rank["down"] for rank in ranks], 0),
        "table": ranks[0]["table"],
    }
