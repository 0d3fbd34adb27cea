"""Collectives inside a graph that AOTInductor compiled once for all ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from nxd_infer import native
from nxd_infer.backends.cpu.linking import linkable, shims
from nxd_infer.backends.cpu.package import collectives_of_package
from nxd_infer.context import current_context
from nxd_infer.util.cpp_library import link_name
from tests.support.needs import needs_native
from tests.support.ranks import run_ranks

pytestmark = needs_native

ROUNDS = 300
QUICK: dict[str, Any] = {
    "cpp.vec_isa_ok": True,
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}
"""The compiler tries out no instruction set and precompiles no header: both take longer than a graph."""


class Step(torch.nn.Module):
    """One of each collective, with what a compiler might fold, merge or drop around them."""

    def __init__(self, ops):
        super().__init__()
        self.ops = ops
        self.weight = torch.nn.Parameter(torch.eye(16))

    def forward(self, x):
        ops = self.ops
        gathered = ops.all_gather(x @ self.weight, "tp", 1, 2)
        scattered = ops.reduce_scatter(ops.all_reduce(gathered, "tp", "sum", 2), "tp", 0, 2)
        whole = ops.all_gather(scattered, "tp", 0, 2)
        constant = ops.all_reduce(torch.full((2,), 3.0), "tp", "sum", 2)
        piece = ops.shard(torch.arange(8.0), "tp", 0, 2)
        return whole.relu(), ops.axis_rank("tp") + 1, constant, piece, ops.broadcast(x, "tp", 1, 2)


def direct(library) -> dict[str, Any]:
    """The operators called directly where they have a C function, not through torch's dispatcher."""
    return {
        "aot_inductor.custom_ops_to_c_shims": shims([library]),
        "aot_inductor.custom_op_libs": [link_name(library.hash)],
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    library = native.load()
    module = Step(getattr(torch.ops, library.namespace))
    exported = torch.export.export(module, (torch.randn(4, 16),))
    path = str(tmp_path_factory.mktemp("step") / "step.pt2")
    options = {**QUICK, **direct(library)}
    with linkable([library]):
        return torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=options)


def repeat(path: str) -> list[torch.Tensor]:
    native.load()
    step = torch._inductor.aoti_load_package(path)
    for number in range(ROUNDS):
        x = torch.full((4, 16), float(number + current_context().rank))
        results = step(x)
        assert results[0][0, 0] == 4 * number and results[0][0, 31] == 4 * (number + 1)
        assert results[4][0, 0] == number + 1
    return list(results)


def test_one_compiled_graph_serves_every_rank_for_many_rounds(package):
    for rank, results in enumerate(run_ranks(repeat, 2, package, collectives="shm")):
        whole, place, constant, piece, sent = results
        last = float(ROUNDS - 1)
        # all_gather: [last | last + 1]; the sum doubles it; the scatter sums two doubled copies and keeps two rows.
        assert whole.shape == (4, 32)
        assert (whole[:, :16] == 4 * last).all() and (whole[:, 16:] == 4 * (last + 1)).all()
        assert place.item() == rank + 1, "the rank is data, not a constant of the compilation"
        assert constant.tolist() == [6, 6], "a collective of a constant is not computed while compiling"
        assert piece.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]][rank]
        assert (sent == last + 1).all()


def lose_a_peer(path: str) -> str:
    native.load()
    step = torch._inductor.aoti_load_package(path)
    x = torch.ones(4, 16)
    step(x)
    if current_context().rank == 1:
        os._exit(3)
    try:
        step(x)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_lost_peer_ends_a_compiled_step_with_an_error_that_names_it(package):
    message, _ = run_ranks(lose_a_peer, 2, package, collectives="shm", comm_timeout=600, lost=(1,))
    assert "nxd: rank(s) [1] did not reach all_gather" in message


class Views(torch.nn.Module):
    """Collectives of views, whose offsets stand in the calls, and of a kind that has no C function."""

    def __init__(self, ops):
        super().__init__()
        self.ops = ops

    def forward(self, x):
        ops = self.ops
        y = x + 1
        first = ops.all_reduce(y[2:], "tp", "max", 2)
        second = ops.all_gather(y[:, 8:].t(), "dp", -1, 2)
        return first, second, ops.broadcast(first, "tp", 1, 2), ops.reduce_scatter(y, "tp", 0, 2)


@pytest.mark.parametrize("calls", ["dispatched", "direct"])
def test_the_collectives_of_compiled_code_are_read_from_its_calls(calls):
    library = native.load()
    options = {**QUICK, "aot_inductor.package": True, "aot_inductor.package_cpp_only": True}  # read, never run
    if calls == "direct":
        options |= direct(library)
    exported = torch.export.export(Views(getattr(torch.ops, library.namespace)), (torch.randn(4, 16),))
    with linkable([library]):
        files = torch._inductor.aot_compile(exported.module(), exported.example_inputs[0], options=options)
    found = collectives_of_package(files, [library.hash])
    assert found is not None and sorted(found) == [
        "all_gather(dp, -1, 2)",
        "all_reduce(tp, max, 2)",
        "broadcast(tp, 1, 2)",
        "reduce_scatter(tp, 0, 2)",
    ]
    assert found.index("all_reduce(tp, max, 2)") < found.index("broadcast(tp, 1, 2)")
    assert collectives_of_package(files, []) is None
