"""Slots for LoRA adapters in a traced decoder: how many, which rank, and at which layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nxd_infer.errors import ModelConfigError, ParallelConfigError
from nxd_infer.modules.lora import AdapterRows, add_adapter_slots


@dataclass(frozen=True)
class AdapterSlots:
    """``slots`` adapters of rank up to ``rank`` for the layers whose last name component is one of ``targets``."""

    slots: int
    rank: int
    targets: tuple[str, ...]

    def add_to(self, model: nn.Module) -> AdapterRows:
        """Add the tables to ``model``. Raises ModelConfigError for targets that it lacks and sizes below 1."""
        try:
            return add_adapter_slots(model, self.targets, self.slots, self.rank)
        except ParallelConfigError as error:
            raise ModelConfigError(str(error)) from error

    def input(self) -> dict[str, Any]:
        """Return the spec of the step input ``adapter``: the slot of each row, 0 for none."""
        return {"role": "adapter", "default": 0, "minimum": 0, "maximum": self.slots}

    def metadata(self) -> dict[str, Any]:
        """Return the metadata that a server needs about the slots."""
        return {"slots": self.slots, "rank": self.rank, "targets": list(self.targets)}

    @staticmethod
    def of(slots: int, rank: int, targets: Sequence[str]) -> AdapterSlots | None:
        """Create the slots; None for 0 slots. Raises ModelConfigError if there are no targets."""
        if slots and not targets:
            raise ModelConfigError(
                f"lora_slots = {slots}: this model's family names no layers that adapters may change; give lora_targets"
            )
        return AdapterSlots(slots, rank, tuple(dict.fromkeys(targets))) if slots else None
