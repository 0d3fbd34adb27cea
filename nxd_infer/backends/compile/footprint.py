"""Memory of the processes of a trace, in bytes, by the size of the graphs.

Measured on x86-64 Linux (torch 2.13, g++ 12) as private and shared memory without file pages, with Llamas of 2, 16
and 28 layers; ``python -m bench trace`` measures again, and fails if a plan is off by more than 10 %. A graph's size is
its number of weights and states: its operators, and the compilers' memory for them, grow with it.
"""

from __future__ import annotations

MIB = 1 << 20

PROGRAM = 230 * MIB
"""A process that has imported what a trace needs, if the system does not report the size of this one."""
EXPORTER = 31 * MIB
"""Additional imports of the first export."""
EXPORTED_TENSOR = 59 << 10
"""What an exported graph leaves behind per tensor."""
BUILDER = 305 * MIB
"""A C++ compiler of the native operators; as many run as there are processors."""
COMPILER, COMPILED_TENSOR = 286 * MIB, 331 << 10
"""A process that compiles graphs: its base size, and the increase per tensor of the largest graph."""
CXX, CXX_TENSOR = 446 * MIB, 798 << 10
"""The C++ compiler that it runs, likewise."""


def exporting(tensors: int, graphs: int) -> int:
    """Return what exporting ``graphs`` graphs of ``tensors`` tensors each adds to a process."""
    return EXPORTER + EXPORTED_TENSOR * tensors * graphs


def compiling(tensors: int) -> int:
    """Return the size of a process that compiles graphs of ``tensors`` tensors, with its C++ compiler."""
    return COMPILER + CXX + (COMPILED_TENSOR + CXX_TENSOR) * tensors
