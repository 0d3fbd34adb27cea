"""What the processes of a trace hold, in bytes, by the size of the graphs.

Measured on x86-64 Linux (torch 2.13, g++ 12) as private and shared memory without pages of files, with Llamas of 2, 16
and 28 layers; ``python -m bench trace`` measures again, and fails where a plan is off by more than a tenth. A graph's
size is the number of weights and states it is given: its operators, and what compilers hold of them, grow with it.
"""

from __future__ import annotations

MIB = 1 << 20

PROGRAM = 230 * MIB
"""A process that has imported what a trace needs, where the system does not say what this one holds."""
EXPORTER = 31 * MIB
"""What the first export imports besides."""
EXPORTED_TENSOR = 59 << 10
"""What an exported graph leaves behind for each tensor it is given."""
BUILDER = 305 * MIB
"""A C++ compiler of the native operators, of which as many run as there are processors."""
COMPILER, COMPILED_TENSOR = 286 * MIB, 331 << 10
"""A process that compiles graphs: at all, and for each tensor of the largest graph."""
CXX, CXX_TENSOR = 446 * MIB, 798 << 10
"""The C++ compiler that it runs."""


def exporting(tensors: int, graphs: int) -> int:
    """What exporting ``graphs`` graphs of ``tensors`` tensors each adds to a process."""
    return EXPORTER + EXPORTED_TENSOR * tensors * graphs


def compiling(tensors: int) -> int:
    """A process that compiles graphs of ``tensors`` tensors, with the C++ compiler it runs."""
    return COMPILER + CXX + (COMPILED_TENSOR + CXX_TENSOR) * tensors
