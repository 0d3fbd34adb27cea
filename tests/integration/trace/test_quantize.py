"""Models traced with weights in eight bits: what they compute, on any backend and degree, updated and recompiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer.backends.cpu.encodings import PACKED, PACKED_INT8
from nxd_infer.errors import TraceConfigError
from nxd_infer.ops.packed import quantize
from tests.support.backends import packed_models, small_traces
from tests.support.needs import needs_native

TOKENS = torch.tensor([[1, 5, 63], [0, 7, 32]])


def trace(*, tp_degree: int = 1, quantize: Any = "int8", packed: Any = 1, **more: Any) -> Any:
    options = {"compiler_args": {"nxd_packed": packed}, "tp_degree": tp_degree, "backend": "eager", **more}
    return small_traces.trace(packed_models.tied, TOKENS, packed_models.tied_checkpoint, quantize=quantize, **options)


def expected(seed: int, degree: int, up: int) -> Tensor:
    """What the plain model gives with the weights that ``degree`` ranks compute with: each rounds what it holds."""
    model = packed_models.tied(seed)
    model.load_state_dict({"up.weight": packed_models.tied_weights(up)["up.weight"]}, strict=False)
    with torch.no_grad():
        for name in packed_models.PACKED_OF_TIED if degree else ():
            parts, dim = (degree, 1) if name == "down.weight" else (1, 0)
            weight = model.get_parameter(name)
            cut = [quantize(part.contiguous()) for part in weight.chunk(parts, dim)]
            weight.copy_(torch.cat([q * scale[:, None] for q, scale in cut], dim))
    return model(TOKENS).detach()


def close(model: Any, seed: int, degree: int, up: int | None = None) -> None:
    """``degree``: 0 where nothing is rounded. ``up``: the seed of one weight, if it has one of its own."""
    wanted = expected(seed, degree, seed if up is None else up)
    torch.testing.assert_close(model(TOKENS), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("form", "encoding", "degree"), [("int8", PACKED_INT8, 2), pytest.param(None, PACKED, 0, marks=needs_native)]
)
def test_a_traced_model_computes_with_its_packed_weights(tmp_path: Path, form: Any, encoding: str, degree: int) -> None:
    with trace(tp_degree=2, quantize=form) as model:
        encodings = {spec.name: spec.encoding for spec in model.manifest.weights if spec.encoding}
        assert encodings == dict.fromkeys(packed_models.PACKED_OF_TIED, encoding)
        assert {spec.dtype for spec in model.manifest.weights} == {"float32"}  # files hold the plain tensors
        assert "packed-weights" in model.manifest.requires
        close(model, 0, degree)
        plain = packed_models.tied(0)(TOKENS).detach()
        apart = float((model(TOKENS) - plain).abs().max()) / float(plain.abs().max())
        assert (1e-4 < apart < 0.02) == (form == "int8")
        model.update_weights(packed_models.tied_weights(5))
        close(model, 5, degree)
        model.update_weights({"up.weight": packed_models.tied_weights(6)["up.weight"]}, strict=False)
        close(model, 5, degree, up=6)
        model.restart()
        close(model, 5, degree, up=6)
        nxd.trace.parallel_model_save(model, tmp_path / "saved")
    with nxd.trace.parallel_model_load(tmp_path / "saved") as loaded:
        close(loaded, 5, degree, up=6)


@needs_native
def test_the_option_is_part_of_the_digest_and_is_kept_when_graphs_are_made_again(tmp_path: Path) -> None:
    found = {}
    for option in ("int8", None):
        with trace(quantize=option, artifact_dir=tmp_path / str(option)) as model:
            found[option] = model.manifest
            assert {spec.encoding for spec in model.manifest.weights} == {"", PACKED_INT8 if option else PACKED}
    assert not found["int8"].graphs.keys() & found[None].graphs.keys()
    assert found["int8"].weight_schema == found[None].weight_schema
    path = tmp_path / "int8"
    nxd.trace.parallel_model_recompile(path, path, compiler_args={"nxd_packed": 1})
    with nxd.trace.parallel_model_load(path) as model:
        close(model, 0, 1)


@needs_native
def test_what_quantize_may_not_be_is_refused_by_name() -> None:
    for bad in ("int3", 8, True, ["int8"]):
        with pytest.raises(TraceConfigError, match=r"quantize=.* is not one of 'int8', .*, or None"):
            trace(quantize=bad)
    with pytest.raises(TraceConfigError, match="a form of packed weights and compiler_args turn those off"):
        trace(packed=False)


def test_without_a_compiler_the_backend_computes_the_same(tmp_path: Path) -> None:
    code = (
        "from tests.integration.trace import test_quantize as test\n"
        "from nxd_infer import native\n"
        "assert native.load_if_possible() is None\n"
        "with test.trace() as model:\n"
        "    assert not model.manifest.ops\n"
        "    test.close(model, 0, 1)\n"
        "    model.update_weights(test.packed_models.tied_weights(5))\n"
        "    test.close(model, 5, 1)\n"
    )
    environment = {**os.environ, "NXD_INFER_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
