"""Any supported model of transformers, tensor parallel: to train it, to trace it, to save and load its shards.

Source: the documentation of Optimum Neuron Distributed. ``import nxd_infer.distributed`` loads nothing; what needs
transformers (the extra ``hf``) imports it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.distributed.apply import apply_plan
    from nxd_infer.distributed.plan import ModelPlan
    from nxd_infer.distributed.plans import plan_for, register_plan

_OWNERS = {
    "ModelPlan": ".plan",
    "apply_plan": ".apply",
    "plan_for": ".plans",
    "register_plan": ".plans",
}

__all__ = ["ModelPlan", "apply_plan", "plan_for", "register_plan"]

__getattr__, __dir__ = lazy_names(__name__, _OWNERS)
