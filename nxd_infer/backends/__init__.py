"""Backends: lower one rank's module for one bucket, compile it, load it, run it. See :mod:`nxd_infer.backends.base`."""

from nxd_infer.backends.base import Availability, Backend, Executable, RankRuntime, get, names
from nxd_infer.graph.stored import Lowered

__all__ = ["Availability", "Backend", "Executable", "Lowered", "RankRuntime", "get", "names"]
