"""torch_xla for scripts that import it where it is not installed: its device is this machine's CPU.

Only :func:`nxd_infer.compat.install` puts it in the place of ``torch_xla``, and never over the real one. Nothing is
lazy: every operator runs at once, and a step's end runs the closures that wait for it.
:mod:`~nxd_infer.compat.torch_xla.host` says how the device "xla" is the CPU, and what is out of reach.
"""

from nxd_infer.compat.torch_xla.runtime import device, device_count, devices, manual_seed, real_devices
from nxd_infer.compat.torch_xla.spawning import launch
from nxd_infer.compat.torch_xla.steps import compile, step, sync

__all__ = ["compile", "device", "device_count", "devices", "launch", "manual_seed", "real_devices", "step", "sync"]

__version__ = "2.9.0+cpu"
