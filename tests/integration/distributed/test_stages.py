"""Models in two pipeline stages of two ranks, with sequence parallelism: loss and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from nxd_infer.distributed.parallelizer import ParallelizersManager
from tests.integration.distributed.test_adapters import FEW, adapted, without_frozen
from tests.integration.distributed.test_apply import wrong_gradients
from tests.support.distributed.models import CASES, Case
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")


def with_adapters(case: Case) -> nn.Module:
    import peft

    return adapted(case, peft.get_peft_model)


def wrong(case: Case, make: Callable[[Case], nn.Module]) -> list[str]:
    whole = make(case).train()
    loss = whole(**case.batch(4)).loss
    loss.backward()
    model = ParallelizersManager.parallelizer_for_model(whole).parallelize(
        make(case).train(), sequence_parallel_enabled=True, pipeline_parallel_num_microbatches=2
    )
    got, found = float(model.run_train(**case.batch(4))), []
    if abs(got - float(loss.detach())) > 1e-5:
        found.append(f"loss {got}, wanted {float(loss.detach())}")
    held = sum(weight.numel() for weight in model.local_parameters())
    if held > 0.6 * sum(weight.numel() for weight in whole.parameters()):
        found.append(f"this rank holds {held} elements")
    local = model.local_module()
    trained = [name for name, weight in local.named_parameters() if weight.requires_grad]
    if not trained or (make is with_adapters and not all("lora_" in name for name in trained)):
        found.append(f"trains {trained}")
    return found + wrong_gradients(*without_frozen(local, whole))


def stages() -> list[str]:
    """One case of each type whose layers are not another's, and two with adapters."""
    plain = {case.kind: case for case in CASES if case.kind not in ("mistral", "qwen2", "roberta")}.values()
    cases = [(case, Case.build) for case in plain] + [(case, with_adapters) for case in FEW[:2]]
    return [f"{case.name} of {make.__name__}: {one}" for case, make in cases for one in wrong(case, make)]


def test_models_in_two_stages_of_two_ranks():
    for rank, found in enumerate(run_ranks(stages, 4, tp=2, pp=2, comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:12])
