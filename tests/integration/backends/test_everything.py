"""A graph of everything that one may hold: what it computes, and that no value of a weight gets into it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer import native
from nxd_infer.backends.cpu.lower import read_program
from nxd_infer.errors import InputMismatchError, RankFailedError, WeightSchemaError
from nxd_infer.graph.ir import Program
from nxd_infer.graph.stored import read_graph
from nxd_infer.ops import packed
from tests.support.backends import small_traces
from tests.support.graph.exporting import load
from tests.support.needs import needs_native

pytestmark = needs_native


@pytest.fixture(scope="module")
def traced() -> Iterator[Any]:
    example = tuple(small_traces.everything_steps(1)[0])
    options = {"tp_degree": 1, "compiler_args": {"nxd_packed": 1}}
    with small_traces.trace(small_traces.everything, example, small_traces.everything_weights, **options) as model:
        yield model


def flat(outputs: dict[str, Any]) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(outputs)


@pytest.mark.smoke
def test_it_computes_what_pytorch_does_with_any_number_of_threads(traced: Any) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            traced.reset_states()
            found.append([flat(traced(*step)) for step in small_traces.everything_steps()])
    finally:
        torch.set_num_threads(before)
    plain = small_traces.everything()
    with torch.no_grad():
        for number, step in enumerate(small_traces.everything_steps()):
            for one, want in zip(found[0][number], flat(plain(*step)), strict=True):
                torch.testing.assert_close(one, want, rtol=1e-5, atol=1e-5)
            for others in found[1:]:
                assert all(map(torch.equal, found[0][number], others[number]))
    (program,) = traced.artifact.path.rglob("program.json")
    for name in ("packed_linears", "cache_attention", "sample_adjusted", "remember_tokens"):
        assert re.search(rf"nxd_[0-9a-f]{{8}}\.{name}\.default", program.read_text()), name


def test_an_index_out_of_range_is_an_error_and_not_the_end_of_the_rank(traced: Any, tmp_path: Path) -> None:
    (step,) = small_traces.everything_steps(1)
    nxd.trace.parallel_model_save(traced, tmp_path / "artifact")
    with nxd.trace.parallel_model_load(tmp_path / "artifact", in_process=False, threads_per_rank=2) as model:
        model(*step)
        step[4][200] = 10
        with pytest.raises(RankFailedError, match="index out of range"):
            model(*step)


class Runtime:
    context = None
    threads = 1

    def library(self, content_hash: str) -> Any:
        return native.load()


def test_decisions_5_7_and_19_values_come_from_the_tensors_given_at_load(traced: Any) -> None:
    """Traced on ones and zeros, run on others: uniform weights are not folded, small constants are not baked in."""
    artifact = traced.artifact
    ((digest, spec),) = artifact.manifest.graphs.items()
    path, generator = artifact.graph_dir(digest), torch.Generator().manual_seed(1)
    weights = {w.name: torch.randn(w.shape, generator=generator) for w in artifact.manifest.weights}
    for weight in artifact.manifest.weights:
        if weight.encoding:
            weights[weight.name] = packed.pack(weights[weight.name])
    assert {w.kind for w in artifact.manifest.weights} == {"parameter", "buffer", "constant"}

    def states() -> dict[str, Tensor]:
        return {state.name: torch.zeros(state.shape, dtype=state.torch_dtype) for state in artifact.manifest.states}

    runtime: Any = Runtime()
    run = load("cpu", path, spec, states(), weights, runtime)
    own, plain, graph = states(), Program(read_program(path)), read_graph(path)

    def reference(step: list[Tensor]) -> list[Tensor]:
        return plain(*(own[s.name] for s in graph.states), *step, *(weights[w.name] for w in graph.weights))

    def equal(step: list[Tensor]) -> bool:
        found, wanted = run(step), reference(step)
        return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

    steps = small_traces.everything_steps()
    assert all(map(equal, steps))
    weights["offset"].add_(5)  # a change inside a tensor is seen at once
    assert equal(steps[0])
    weights["norm.weight"] = torch.zeros(6)
    run.update_weights({"norm.weight": weights["norm.weight"]})
    assert equal(steps[0])
    with pytest.raises(InputMismatchError, match=r"'x' has shape \[1, 6\]"):
        run([steps[0][0][:1], *steps[0][1:]])
    with pytest.raises(WeightSchemaError, match="has shape"):
        load("cpu", path, spec, states(), {**weights, "norm.bias": torch.zeros(5)}, runtime)
