"""Models traced with weights in eight bits: what they compute, on any backend and degree, updated and recompiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.backends.cpu.encodings import PACKED, PACKED_INT8
from nxd_infer.errors import TraceConfigError
from nxd_infer.ops.packed_int8 import quantize
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.save_load import parallel_model_save
from nxd_infer.trace.recompile import parallel_model_recompile
from tests.support.backends import packed_models
from tests.support.needs import needs_inductor, needs_native

TOKENS = torch.tensor([[1, 5, 63], [0, 7, 32]])


def trace(*, backend: str = "eager", tp_degree: int = 1, quantize: Any = "int8", packed: Any = 1, **more: Any) -> Any:
    return nxd.trace.parallel_model_trace(
        packed_models.tied,
        TOKENS,
        compiler_args={"nxd_packed": packed},
        inline_weights_to_neff=False,
        tp_degree=tp_degree,
        checkpoint_loader_callable=packed_models.tied_checkpoint,
        backend=backend,
        quantize=quantize,
        **more,
    )


def rounded(seed: int, degree: int) -> nn.Module:
    """The plain model with the weights that ``degree`` ranks compute with: each rounds what it holds of one."""
    model = packed_models.tied(seed)
    with torch.no_grad():
        for name, parts, dim in (("embed.weight", 1, 0), ("up.weight", 1, 0), ("down.weight", degree, 1)):
            weight = model.get_parameter(name)
            cut = [quantize(part.contiguous()) for part in weight.chunk(parts, dim)]
            weight.copy_(torch.cat([q * scale[:, None] for q, scale in cut], dim))
    return model


def expected(seed: int, degree: int) -> Tensor:
    return rounded(seed, degree)(TOKENS).detach()


@pytest.mark.parametrize(
    ("backend", "tp_degree", "other"),
    [
        pytest.param("eager", 1, "inductor", marks=needs_inductor),
        ("eager", 2, ""),
        pytest.param("inductor", 2, "eager", marks=needs_inductor),
    ],
)
def test_a_traced_model_computes_with_the_rounded_weights(
    backend: str, tp_degree: int, other: str, tmp_path: Path
) -> None:
    with trace(backend=backend, tp_degree=tp_degree) as model:
        encodings = {spec.name: spec.encoding for spec in model.manifest.weights if spec.encoding}
        assert encodings == dict.fromkeys(("embed.weight", "up.weight", "down.weight"), PACKED_INT8)
        assert {spec.dtype for spec in model.manifest.weights} == {"float32"}  # files hold the plain tensors
        found = model(TOKENS)
        torch.testing.assert_close(found, expected(0, tp_degree), rtol=1e-5, atol=1e-5)
        plain = packed_models.tied(0)(TOKENS).detach()
        assert 0 < float((found - plain).abs().max()) < 0.02 * float(plain.abs().max())
        model.update_weights(packed_models.tied_weights(5))
        torch.testing.assert_close(model(TOKENS), expected(5, tp_degree), rtol=1e-5, atol=1e-5)
        model.restart()
        torch.testing.assert_close(model(TOKENS), expected(5, tp_degree), rtol=1e-5, atol=1e-5)
        parallel_model_save(model, tmp_path / "saved")
    if other:
        parallel_model_recompile(tmp_path / "saved", tmp_path / "again", backend=other)
    for place in ("saved", "again") if other else ("saved",):
        with nxd.trace.parallel_model_load(tmp_path / place) as loaded:
            torch.testing.assert_close(loaded(TOKENS), expected(5, tp_degree), rtol=1e-5, atol=1e-5)


@needs_native
def test_the_option_is_part_of_the_digest_and_of_nothing_else(tmp_path: Path) -> None:
    digests = []
    for option in ("int8", None):
        with trace(quantize=option, artifact_dir=tmp_path / str(option)) as model:
            digests.append(set(model.manifest.graphs))
            encodings = {spec.encoding for spec in model.manifest.weights}
            assert encodings == {"", PACKED_INT8 if option else PACKED}
    assert not digests[0] & digests[1]
    schemas = {load_artifact(tmp_path / str(option)).manifest.weight_schema for option in ("int8", None)}
    assert len(schemas) == 1


def test_what_quantize_may_not_be_is_refused_by_name() -> None:
    for bad in ("int4", 8, True, ["int8"]):
        with pytest.raises(TraceConfigError, match=r"quantize=.* is not one of 'int8', or None"):
            trace(quantize=bad)
    with pytest.raises(TraceConfigError, match="a form of packed weights and compiler_args turn those off"):
        trace(packed=False)


def test_without_a_compiler_the_eager_backend_computes_the_same(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from tests.trace import test_quantize as test\n"
        "from nxd_infer.backends.cpu.operators import native_library\n"
        "assert native_library() is None\n"
        "with test.trace() as model:\n"
        "    assert not model.manifest.ops\n"
        "    torch.testing.assert_close(model(test.TOKENS), test.expected(0, 1), rtol=1e-5, atol=1e-5)\n"
        "    model.update_weights(test.packed_models.tied_weights(5))\n"
        "    torch.testing.assert_close(model(test.TOKENS), test.expected(5, 1), rtol=1e-5, atol=1e-5)\n"
        "print('fine')\n"
    )
    environment = {**os.environ, "NXD_INFER_CACHE": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr[-2000:]
