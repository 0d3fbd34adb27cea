"""Save and restore the state of a process's random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from nxd_infer.errors import CheckpointError
from nxd_infer.parallel_layers.random import get_xla_rng_tracker
from nxd_infer.util.devices import ACCELERATOR, accelerator_state, has_accelerator, set_accelerator_state


def random_state() -> dict[str, Any]:
    """Return the state of this process's generators: PyTorch's, the tensor-parallel streams, Python's, NumPy's."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "streams": get_xla_rng_tracker().get_states(),
        "python": random.getstate(),
    }
    if (accelerator := accelerator_state()) is not None:
        state[ACCELERATOR] = accelerator
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def restore_random_state(state: Mapping[str, Any], where: str) -> None:
    """Restore the generators. Raises CheckpointError naming ``where`` unless ``state`` is from :func:`random_state`."""
    try:
        torch.set_rng_state(state["torch"])
        get_xla_rng_tracker().set_states(state["streams"])
        random.setstate(state["python"])
        if ACCELERATOR in state and has_accelerator():
            set_accelerator_state(state[ACCELERATOR])
        numpy = sys.modules.get("numpy")
        if "numpy" in state and numpy is not None:
            numpy.random.set_state(state["numpy"])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"the random state in {where} is damaged: {error!r:.200}; load another tag") from error
