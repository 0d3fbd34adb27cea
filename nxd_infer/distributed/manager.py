"""ParallelizersManager: which models can be parallelized, how far, and by which class.

Source: the documentation of Optimum Neuron Distributed, "Selecting Model-Specific Parallelizer Classes".
"""

from __future__ import annotations

from typing import Any

from nxd_infer.distributed.parallelizer import Parallelizer
from nxd_infer.distributed.plan_registry import plan_of_type, supported_types, unknown_type

_classes: dict[str, type[Parallelizer]] = {}


class ParallelizersManager:
    """Finds the :class:`Parallelizer` of a model, by the ``model_type`` of its configuration."""

    @classmethod
    def get_supported_model_types(cls) -> list[str]:
        """Return the model types that can be parallelized, in alphabetical order."""
        return supported_types()

    @classmethod
    def is_model_supported(cls, model_type_or_model: Any) -> tuple[bool, bool, bool]:
        """Return whether tensor, sequence and pipeline parallelism can be used for a model or a model type."""
        kind = _type_of(model_type_or_model)
        if kind not in supported_types():
            return (False, False, False)
        plan = plan_of_type(kind)
        return (True, plan.sequence_parallel, plan.pipeline_parallel)

    @classmethod
    def parallelizer_for_model(cls, model_type_or_model: Any) -> type[Parallelizer]:
        """Return the parallelizer of a model or a model type.

        Raises ModelConfigError, with the supported types, if there is none.
        """
        kind = _type_of(model_type_or_model)
        if kind not in supported_types():
            raise unknown_type(kind)
        if kind not in _classes:
            name = "".join(part.capitalize() for part in kind.split("_"))
            _classes[kind] = type(f"{name}Parallelizer", (Parallelizer,), {"model_type": kind})
        return _classes[kind]


def _type_of(model_type_or_model: Any) -> str:
    if isinstance(model_type_or_model, str):
        return model_type_or_model
    return model_type_or_model.config.model_type
