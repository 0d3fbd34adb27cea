"""Which models the Parallelizer splits."""

from __future__ import annotations

import re

import pytest

from nxd_infer.distributed import ModelPlan, ParallelizersManager, plan_registry, register_plan
from nxd_infer.errors import ModelConfigError, ParallelConfigError


def test_a_model_without_a_plan_is_refused_with_those_that_have_one():
    assert ParallelizersManager.is_model_supported("resnet") == (False, False, False)
    with pytest.raises(ModelConfigError, match=re.escape("did you mean llama?")):
        ParallelizersManager.parallelizer_for_model("lama")


def test_a_registered_plan_makes_a_type_supported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_registry, "_REGISTERED", {})
    register_plan("mine", ModelPlan({"up": "column", "down": "row"}, pipeline_parallel=False))
    assert ParallelizersManager.is_model_supported("mine") == (True, True, False)
    with pytest.raises(ParallelConfigError, match="colum"):
        ModelPlan({"up": "colum"})
