"""Compile a graph with AOTInductor in this process, which does nothing else: inductor keeps global state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch._inductor

from nxd_infer.backends.cpu.linking import linkable, shims
from nxd_infer.backends.cpu.lower import read_program
from nxd_infer.backends.cpu.operators import register_operators
from nxd_infer.backends.cpu.package import collectives_of_package, unpack
from nxd_infer.backends.cpu.packing import encoded_spec
from nxd_infer.backends.cpu.serial_loops import keep_small_loops_serial
from nxd_infer.graph.ir import ir_to_graph
from nxd_infer.graph.stored import GRAPH_FILE, read_graph
from nxd_infer.util.cpp_library import link_name


def compile_here(graph_dir: Path, settings: Mapping[str, Any], code: Path, simdlen: int) -> None:
    """Write the compiled code of ``graph_dir`` to ``code``, and the collectives that it calls to its
    ``graph.json``. ``simdlen``: width of the target's vectors in bits."""
    _prepare(simdlen)
    graph = read_graph(graph_dir)
    direct = [library for library in register_operators(graph, graph_dir) if shims([library])]
    weights = [encoded_spec(spec, spec.encoding) for spec in graph.weights]
    examples = [
        torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype)
        for spec in (*graph.states, *graph.inputs, *weights)
    ]
    options = {
        **settings,
        "aot_inductor.custom_ops_to_c_shims": shims(direct),
        "aot_inductor.custom_op_libs": [link_name(library.hash) for library in direct],
    }
    module = ir_to_graph(read_program(graph_dir))
    with torch.no_grad(), linkable(direct):
        files = torch._inductor.aot_compile(module, tuple(examples), options=options)
    unpack(files, code)
    found = collectives_of_package(files, graph.ops)
    if found is not None:
        graph.collectives = found
        (graph_dir / GRAPH_FILE).write_text(graph.model_dump_json(indent=1) + "\n", encoding="utf-8")


@functools.cache
def _prepare(simdlen: int) -> None:
    """Call once in a process, whose graphs are then all for one target."""
    keep_small_loops_serial()
    _restrict_instruction_set(simdlen)


def _restrict_instruction_set(simdlen: int) -> None:
    """Keep inductor from using more than the target has: for AVX-512, neither VNNI nor AMX nor BF16."""
    if simdlen != 512:
        return
    from torch._inductor import cpu_vec_isa

    if hasattr(cpu_vec_isa, "VecAVX512") and hasattr(cpu_vec_isa, "valid_vec_isa_list"):
        cpu_vec_isa.VecAVX512.build_arch_flags = lambda self: self._arch_flags
        plain = cpu_vec_isa.VecAVX512()
        cpu_vec_isa.valid_vec_isa_list = lambda: [plain]
