"""The table of old names: where each name of neuronx_distributed and torch_neuronx is here.

A module that is not listed has the same path here, with all its names. Sorted by path, and names within a module too.
``nxd-infer port`` and docs/migration.md read the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ROOTS: dict[str, str | None] = {
    "neuronx_distributed": "nxd_infer",
    "optimum.neuron": None,
    "torch_neuronx": "nxd_infer.compat.torch_neuronx",
}
"""Packages whose names are answered, and ours that has the same paths below it (None: what is listed, no more)."""


@dataclass(frozen=True)
class Module:
    """One module of an old package."""

    ours: str | None = None
    """The module here whose names it has as well (default: the one of the same path, if there is one)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """An old name and ``"nxd_infer.module:attribute"`` (``"nxd_infer.module"``: the attribute has the same name)."""
    device: Mapping[str, str] = field(default_factory=dict)
    """A name that only a Neuron device can have, and what to call instead. Importing it works, using it raises."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """An old name, and how it behaves otherwise here."""


OLD: dict[str, Module] = {
    "neuronx_distributed.scripts.checkpoint_converter": Module("nxd_infer.checkpoint.neuronx.converter"),
    "neuronx_distributed.trace.trace": Module("nxd_infer.trace.api"),
    "neuronx_distributed.trainer.checkpoint": Module("nxd_infer.checkpoint.api"),
    "neuronx_distributed.trainer.model": Module("nxd_infer.modules.nxd_model"),
    "neuronx_distributed.utils.tensor_capture": Module("nxd_infer.modules.tensor_capture"),
    "neuronx_distributed.utils.tensor_replacement": Module("nxd_infer.modules.tensor_replacement"),
    "neuronx_distributed.utils.tensor_replacement.registry": Module("nxd_infer.modules.tensor_replacement"),
    "optimum.neuron.distributed": Module("nxd_infer.distributed"),
}
