"""Canonical graphs of modules and of model families, traced in this process, and run on all ranks in lockstep."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.comm import register_collectives, unregister_collectives
from nxd_infer.context import make_context, use_context
from nxd_infer.graph.canonical import Graph, trace_graph
from nxd_infer.graph.export import Step, named_inputs, state_names
from nxd_infer.graph.ir import FUNCTIONAL, Program, graph_to_ir
from nxd_infer.graph.split import Split
from nxd_infer.layout.sources import named_tensors
from tests.support import tiny_models


def _plugin() -> Any:
    """The module of the other package's backend, which stays uninstalled."""
    spec = importlib.util.spec_from_file_location(
        "lockstep_of_tests", Path(__file__).with_name("plugin") / "lockstep.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


Lockstep = _plugin().Lockstep
SMALL = {"num_hidden_layers": 1}


class Rank:
    """One rank's graph of one bucket, and the tensors it runs on."""

    def __init__(self, module: nn.Module, example: Any, states: Sequence[Any], rank: int):
        inputs, keyword = named_inputs(module, example)
        step = Step(module, inputs, keyword, state_names(module, states))
        self.graph: Graph = trace_graph(step)
        own = named_tensors(module)
        generator = torch.Generator().manual_seed(rank)
        self.inputs = list(inputs.values())
        self.states = [own[spec.name].detach().clone() for spec in self.graph.file.states]
        self.weights = []
        for spec in self.graph.file.weights:
            value = self.graph.constants.get(spec.name, own.get(spec.name))
            assert value is not None
            if spec.kind == "parameter":
                value = torch.randn(value.shape, generator=generator) * 0.2
            self.weights.append(value.detach())


@functools.cache
def directory(family: str, root: Path, vocabulary: int = tiny_models.VOCAB_SIZE, kv_heads: int = 0) -> Path:
    more = {"num_key_value_heads": kv_heads} if kv_heads else {}
    path = root / f"{family}-{vocabulary}-{kv_heads}"
    return tiny_models.write_tiny(family, path, vocab_size=vocabulary, **SMALL, **more)


def ranks_of(
    family: str,
    degree: int,
    root: Path,
    *,
    bucket: int = 0,
    vocabulary: int = tiny_models.VOCAB_SIZE,
    kv_heads: int = 0,
    **options: Any,
) -> list[Rank]:
    """The ranks of ``family`` at ``degree``; ``options``: of the plan."""
    from nxd_models.serving import tasks

    task = {"bert": "embed", "roberta": "embed", "bert_classifier": "classify", "roberta_classifier": "classify"}
    plan = tasks.plan(
        directory(family, root, vocabulary, kv_heads),
        task.get(family, "generate"),
        batch_sizes=[2],
        prompt_buckets=[4],
        dtype=torch.float32,
        **({"max_len": 16} if family not in task else {}),
        **options,
    )
    arguments = plan.trace_arguments()
    examples = arguments["example_inputs"]
    found = []
    for rank in range(degree):
        with use_context(make_context(degree, rank, tp=degree, collectives="none")):
            module = plan.func(**plan.func_kwargs)
            module = (module[0] if isinstance(module, tuple) else module).eval()
            found.append(Rank(module, examples[bucket], getattr(module, "nxd_states", ()), rank))
    return found


def program(module: torch.fx.GraphModule) -> Program:
    return Program(graph_to_ir(module, FUNCTIONAL))


def run_parts(split: Split) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """The full graph, by its parts in turn, each on copies of what it takes."""
    programs = [(part, program(part.module)) for part in (split.head, split.body, split.tail)]

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        known = dict(zip(split.given, values, strict=True))
        for part, made in programs:
            known.update(zip(part.gives, made(*(known[name].clone() for name in part.takes)), strict=True))
        return [known[name] for name in split.results]

    return run


def follow(
    ranks: list[Rank], step: Callable[[int, list[Tensor], list[Tensor]], list[Tensor]]
) -> list[list[list[Tensor]]]:
    """``[rank][step]``: what ``step(rank, states, inputs)`` returns, outputs and new states, in three steps."""

    def run(number: int) -> list[list[Tensor]]:
        rank, states = ranks[number], list(ranks[number].states)
        results = []
        for inputs in steps_of(rank):
            results.append(step(number, states, inputs))
            states = results[-1][len(rank.graph.file.outputs) :]
        return results

    return in_lockstep(len(ranks), run)


def in_lockstep(degree: int, run: Callable[[int], Any]) -> list[Any]:
    """``run(rank)`` of every rank at once, each a thread with its own context."""
    device, key = Lockstep(degree), f"test-{threading.get_ident()}"
    for rank in range(degree):
        register_collectives(f"{key}-{rank}", device.of(rank))

    def one(rank: int) -> Any:
        try:
            with torch.no_grad(), use_context(make_context(degree, rank, tp=degree, collectives=f"{key}-{rank}")):
                return run(rank)
        except BaseException:
            device.abort()
            raise

    try:
        with ThreadPoolExecutor(degree) as threads:
            return list(threads.map(one, range(degree)))
    finally:
        for rank in range(degree):
            unregister_collectives(f"{key}-{rank}")


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """To the bit; NaN equals NaN."""
    return all(
        a.dtype == b.dtype and torch.equal(torch.nan_to_num(a.double(), 7), torch.nan_to_num(b.double(), 7))
        for a, b in zip(found, wanted, strict=True)
    )


def steps_of(rank: Rank) -> list[list[Tensor]]:
    """Inputs of three steps: every row drawn in another way, tokens that the graph itself remembers in the second."""
    found = []
    for number in range(3):
        given = {spec.name: value.clone() for spec, value in zip(rank.graph.file.inputs, rank.inputs, strict=True)}
        rows = len(rank.inputs[0])
        if "block_table" in given:
            length = given["tokens"].shape[1]
            given["tokens"] = (torch.arange(rows * length).view(rows, length) * 37 + number * 11 + 5) % 280
            if number == 1:
                given["tokens"][:, 0] = -1
            given["block_table"] = torch.arange(rows)[:, None]
            given["start"] = torch.full((rows,), number * length)
            given["length"] = torch.full((rows,), length)
            given["temperature"][-1] = 0.9
            given["presence_penalty"][-1] = 0.5
            given["seed"][-1] = 7
        found.append(list(given.values()))
    return found


def run_whole(ranks: list[Rank]) -> list[list[list[Tensor]]]:
    """``[rank][step]``: outputs and new states, of the canonical graph as it is."""
    programs = [program(rank.graph.module) for rank in ranks]
    return follow(ranks, lambda number, states, inputs: programs[number](*states, *inputs, *ranks[number].weights))
