"""An artifact written once, by ``toy.build(..., degree=2, buckets=BUCKETS[:1])``, loads and computes what it did.

A change that breaks this test breaks every artifact there is: raise the format's major version instead.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.trace.recompile import parallel_model_recompile
from nxd_infer.util.machine import architecture
from tests.support import toy_artifacts as toy
from tests.support.backends.manifests import changed

GOLDEN = Path(__file__).parent / "golden" / "format_2_0"


def test_it_loads_and_computes_what_it_did_and_is_recompiled(tmp_path: Path):
    path = Path(shutil.copytree(GOLDEN, tmp_path / "golden"))
    with changed(path) as manifest:  # as if it had been written by the torch and on the machine of today
        manifest["versions"]["torch"] = torch.__version__
        manifest["target"]["arch"] = architecture()
    assert [spec.default for spec in load_artifact(path).manifest.buckets[0].inputs] == [None, 0.0]
    parallel_model_recompile(path, tmp_path / "again")
    x, ids = torch.randn(2, 3, toy.HIDDEN), torch.tensor([1, 2])
    for artifact in (path, tmp_path / "again"):
        with TensorParallelModel(str(artifact), call_timeout=60, start_timeout=600) as model:
            out = model(x, ids)
            assert toy.close_to(out["y"], toy.expected(toy.logical_weights(), x, ids))
            assert out["count"].item() == 1
            assert out["memory"].tolist() == [2.0, 3.0, 4.0]
