"""The Parallelizer's whole way for every model: loaded lazily, trained, saved in shards, consolidated, loaded again."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.checkpoint import consolidate_checkpoint
from tests.support.distributed.models import CASES, Case
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
NEAR = 1e-5
"""Of the largest logit: those of T5 are large."""
ONCE = list({case.kind: case for case in CASES}.values())
"""One case of each type."""


def auto_class(case: Case) -> Any:
    import transformers

    return getattr(transformers, case.head)


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(**batch).logits


def near(found: Tensor, wanted: Tensor) -> bool:
    return float((found - wanted).abs().max()) <= NEAR * max(1.0, float(wanted.abs().max()))


def whole_way(folder: Path, case: Case) -> Tensor:
    """Load, train one step, save; return the logits after that."""
    manager = nxd.distributed.ParallelizersManager
    with nxd.distributed.lazy_load_for_parallelism(tensor_parallel_size=2):
        model = auto_class(case).from_pretrained(folder / case.kind, attn_implementation="eager")
    assert all(weight.is_meta for weight in model.parameters())
    construct = nxd.distributed.make_optimizer_constructor_lazy(torch.optim.SGD)
    optimizer = construct(model.parameters(), lr=0.01)
    parallelizer = manager.parallelizer_for_model(model)
    model = parallelizer.parallelize(model, sequence_parallel_enabled=manager.is_model_supported(case.kind)[1])
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    optimizer = parallelizer.optimizer_for_mp(optimizer, nxd.distributed.parameter_mapping(model))
    model.train()
    model(**case.batch()).loss.backward()
    optimizer.step()
    parallelizer.save_model_sharded_checkpoint(model, folder / f"{case.kind}-shards", optimizer=optimizer)
    return logits(model, case.batch())


def whole_ways(folder: Path) -> list[Tensor | str]:
    found: list[Tensor | str] = []
    for case in ONCE:
        try:
            found.append(whole_way(folder, case))
        except Exception:
            found.append(traceback.format_exc())
    return found


def one_step(case: Case) -> Tensor:
    model = case.build().train()
    model(**case.batch()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return logits(model, case.batch())


def test_every_model_comes_back_as_it_was_trained(tmp_path: Path):
    for case in ONCE:
        case.build().save_pretrained(tmp_path / case.kind)
    problems = []
    for case, found in zip(ONCE, run_ranks(whole_ways, 2, tmp_path, comm_timeout=120)[0], strict=True):
        if isinstance(found, str):
            problems.append(f"{case.kind}: {found}")
            continue
        if not near(found, one_step(case)):
            problems.append(f"{case.kind}: trained to {float((found - one_step(case)).abs().max()):.1e} beside")
        out = tmp_path / f"{case.kind}-whole"
        consolidate_checkpoint(tmp_path / f"{case.kind}-shards", out)
        loaded = auto_class(case).from_pretrained(out, attn_implementation="eager", dtype=torch.float32)
        if not near(logits(loaded, case.batch()), found):
            problems.append(f"{case.kind}: consolidated, its logits differ")
    assert not problems, "\n".join(problems)
