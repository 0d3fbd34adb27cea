"""The neuron backend: HLO compiled by neuronx-cc, run on the NeuronCores of Inf2 and Trn1. Not yet run on one.

These modules need torch and are imported on first use: a server's process reads the backend's facts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.backends.neuron import executable, lower, runtime

__all__ = ["executable", "lower", "runtime"]
__getattr__, __dir__ = lazy_names(__name__, modules=__all__)
