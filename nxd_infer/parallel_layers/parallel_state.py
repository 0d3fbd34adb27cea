"""``nxd_infer.parallel_layers.parallel_state``: the documented path of :mod:`nxd_infer.parallel_state`."""

from nxd_infer.parallel_state import *  # noqa: F403
