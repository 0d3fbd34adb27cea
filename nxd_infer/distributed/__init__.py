"""Any supported model of transformers, tensor parallel: to train it, to trace it, to save and load its shards.

Source: the documentation of Optimum Neuron Distributed. ``import nxd_infer.distributed`` loads nothing; what needs
transformers (the extra ``hf``) imports it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.distributed.adapters import get_peft_model
    from nxd_infer.distributed.apply import apply_plan
    from nxd_infer.distributed.lazy import lazy_load_for_parallelism
    from nxd_infer.distributed.model_plan import ModelPlan
    from nxd_infer.distributed.optimizers import make_optimizer_constructor_lazy
    from nxd_infer.distributed.parallelizer import Parallelizer, ParallelizersManager, parameter_mapping
    from nxd_infer.distributed.plan_registry import plan_for, register_plan

_OWNERS = {
    "ModelPlan": ".model_plan",
    "Parallelizer": ".parallelizer",
    "ParallelizersManager": ".parallelizer",
    "apply_plan": ".apply",
    "get_peft_model": ".adapters",
    "lazy_load_for_parallelism": ".lazy",
    "make_optimizer_constructor_lazy": ".optimizers",
    "parameter_mapping": ".parallelizer",
    "plan_for": ".plan_registry",
    "register_plan": ".plan_registry",
}

__all__ = [
    "ModelPlan",
    "Parallelizer",
    "ParallelizersManager",
    "apply_plan",
    "get_peft_model",
    "lazy_load_for_parallelism",
    "make_optimizer_constructor_lazy",
    "parameter_mapping",
    "plan_for",
    "register_plan",
]

__getattr__, __dir__ = lazy_names(__name__, _OWNERS)
