"""Backends: compile a rank's graphs, place its tensors, run it. See :mod:`nxd_infer.backends.base`."""

from nxd_infer.backends.registry import get, names

__all__ = ["get", "names"]
