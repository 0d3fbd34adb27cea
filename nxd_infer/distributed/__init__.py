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

__all__ = [
    "ModelPlan", "Parallelizer", "ParallelizersManager", "apply_plan", "get_peft_model", "lazy_load_for_parallelism",
    "make_optimizer_constructor_lazy", "parameter_mapping", "plan_for", "register_plan",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".adapters": "get_peft_model",
        ".apply": "apply_plan",
        ".lazy": "lazy_load_for_parallelism",
        ".model_plan": "ModelPlan",
        ".optimizers": "make_optimizer_constructor_lazy",
        ".parallelizer": "Parallelizer ParallelizersManager parameter_mapping",
        ".plan_registry": "plan_for register_plan",
    },
)
