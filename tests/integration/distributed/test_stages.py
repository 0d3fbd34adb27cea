"""Every model in two pipeline stages of two ranks, with sequence parallelism: loss and gradients of one process."""

from __future__ import annotations

import pytest
import torch

from nxd_infer.distributed.manager import ParallelizersManager
from tests.integration.distributed.test_adapters import FEW, adapted
from tests.integration.distributed.test_apply import wrong_gradients
from tests.support.distributed.models import CASES
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")


def stages() -> list[str]:
    found = []
    for case in {case.kind: case for case in CASES}.values():
        whole = case.build().train()
        loss = whole(**case.batch(4)).loss
        loss.backward()
        parallelizer = ParallelizersManager.parallelizer_for_model(whole)
        model = parallelizer.parallelize(
            case.build(), sequence_parallel_enabled=True, pipeline_parallel_num_microbatches=2
        )
        got = float(model.run_train(**case.batch(4)))
        if abs(got - float(loss.detach())) > 1e-5:
            found.append(f"{case.name}: loss {got}, wanted {float(loss.detach())}")
        found += [f"{case.name}: {one}" for one in wrong_gradients(model.local_module(), whole)]
        held = sum(weight.numel() for weight in model.local_parameters())
        if held > 0.6 * sum(weight.numel() for weight in whole.parameters()):
            found.append(f"{case.name}: this rank holds {held} elements")
    return found


def stages_with_adapters() -> list[str]:
    """Adapters made before: their gradients are those of one process, and nothing else is trained."""
    import peft

    found = []
    for case in FEW:
        whole = adapted(case, peft.get_peft_model).train()
        loss = whole(**case.batch(4)).loss
        loss.backward()
        parallelizer = ParallelizersManager.parallelizer_for_model(whole)
        model = parallelizer.parallelize(
            adapted(case, peft.get_peft_model).train(),
            sequence_parallel_enabled=True,
            pipeline_parallel_num_microbatches=2,
        )
        got = float(model.run_train(**case.batch(4)))
        if abs(got - float(loss.detach())) > 1e-5:
            found.append(f"{case.name}: loss {got}, wanted {float(loss.detach())}")
        local = model.local_module()
        trained = [name for name, weight in local.named_parameters() if weight.requires_grad]
        if not trained or not all("lora_" in name for name in trained):
            found.append(f"{case.name}: trains {trained}")
        for weight in (*local.parameters(), *whole.parameters()):  # frozen ones have no gradient to compare
            weight.grad = weight.grad if weight.requires_grad else torch.zeros_like(weight)
        found += [f"{case.name}: {one}" for one in wrong_gradients(local, whole)]
    return found


def test_adapters_in_two_stages_of_two_ranks():
    pytest.importorskip("peft")
    for rank, found in enumerate(run_ranks(stages_with_adapters, 4, tp=2, pp=2, comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:12])


def test_models_in_two_stages_of_two_ranks():
    for rank, found in enumerate(run_ranks(stages, 4, tp=2, pp=2, comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:12])
