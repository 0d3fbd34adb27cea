"""The ZeRO-1 optimizer under the reference's module path."""

from nxd_infer.optimizer.zero1 import NeuronZero1Optimizer

__all__ = ["NeuronZero1Optimizer"]
