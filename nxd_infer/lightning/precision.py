"""The precision plugin."""

from __future__ import annotations

from lightning.pytorch.plugins import Precision

__all__ = ["NeuronXLAPrecisionPlugin"]


class NeuronXLAPrecisionPlugin(Precision):
    """Parameters keep the dtype that the model function gives them; the optimizer's options say what is in float32.

    Master weights and float32 sums of gradients are ``mixed_precision_config`` of the nxd_config. Without the plugin,
    ``Trainer(precision="bf16-true")`` converts the model, and ``"bf16-mixed"`` runs its operators under autocast.
    """
