"""The optimizer wrapper under the reference's module path."""

from nxd_infer.optimizer.parallel import NxDOptimizer

__all__ = ["NxDOptimizer"]
