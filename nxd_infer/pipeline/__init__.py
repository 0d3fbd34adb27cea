"""Pipeline parallelism: a model over stages, each on ranks of its own. See :class:`~nxd_infer.pipeline.NxDPPModel`."""

from nxd_infer.pipeline.model import NxDPPModel

__all__ = ["NxDPPModel"]
