"""Models whose ranks need different graphs, which replicas cannot run: refused when they are traced, and later."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.xla.rig import require

require()

from nxd_infer import trace  # noqa: E402
from nxd_infer.errors import TraceError  # noqa: E402
from nxd_infer.trace.recompile import parallel_model_recompile  # noqa: E402
from tests.support import traced_models as models  # noqa: E402


def traced(backend: str) -> trace.TensorParallelModel:
    return trace.parallel_model_trace(
        models.baked_rank, (models.torch.ones(2, 4),), tp_degree=2, backend=backend, inline_weights_to_neff=False
    )


def test_it_is_refused_when_it_is_traced() -> None:
    with pytest.raises(TraceError, match=r"another graph on rank 1 than on rank 0, which the xla backend forbids"):
        traced("xla")


def test_it_is_refused_when_it_is_compiled_again(tmp_path: Path) -> None:
    with traced("eager") as model:
        trace.parallel_model_save(model, tmp_path / "eager")
    with pytest.raises(TraceError, match=r"have 2 graphs, and the xla backend runs one on all of them"):
        parallel_model_recompile(tmp_path / "eager", tmp_path / "xla", backend="xla")
