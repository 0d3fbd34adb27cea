"""Optimizers for sharded parameters: :class:`NxDOptimizer`, and ZeRO-1 as :class:`NeuronZero1Optimizer`."""

from nxd_infer.optimizer.parallel import NxDOptimizer
from nxd_infer.optimizer.zero1 import NeuronZero1Optimizer

__all__ = ["NeuronZero1Optimizer", "NxDOptimizer"]
