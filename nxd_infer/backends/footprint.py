"""What the processes of a trace hold, in bytes, by the size of the graphs.

Measured on Linux (x86-64, torch 2.10, g++ 13) as anonymous and shared memory, without pages of files: with
``python -m bench sizes`` and ``python -m bench trace``, which measure it again and fail when it is off by more than a
tenth. A graph's size is the number of weights and states it is given: its operators, and what compilers hold of them,
go with it.
"""

from __future__ import annotations

MIB = 1 << 20

PROGRAM = 230 * MIB
"""A process that has imported what a trace needs, where the system does not say what this one holds."""
EXPORTER = 30 * MIB
"""What the first export imports besides."""
EXPORTED_TENSOR = 100 << 10
"""What an exported graph keeps for each tensor it is given, until the rank's weights are written."""
BUILDER = 310 * MIB
"""A C++ compiler of the native operators, of which as many run as there are processors."""
COMPILER = (270 * MIB, 440 << 10)
"""A process that compiles graphs: at all, and for each tensor of the largest graph."""
CXX = (300 * MIB, 1340 << 10)
"""The C++ compiler that it runs."""


def exporting(tensors: int, graphs: int) -> int:
    """What exporting ``graphs`` graphs of ``tensors`` tensors each adds to a process."""
    return EXPORTER + EXPORTED_TENSOR * tensors * graphs


def compiling(tensors: int) -> int:
    """A process that compiles graphs of ``tensors`` tensors, with the C++ compiler it runs."""
    return sum(base + each * tensors for base, each in (COMPILER, CXX))
