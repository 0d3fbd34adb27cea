"""A graph in pipeline stages computes what the whole graph does, each stage with its own weights and states."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nxd_infer.errors import TraceError
from nxd_infer.graph.canonical import trace_graph
from nxd_infer.graph.export import Step, named_inputs
from nxd_infer.graph.stages import split_stages
from nxd_infer.layout.sources import named_tensors

SIZE, ROWS = 6, 3


class Block(nn.Module):
    """A linear layer that adds what it gives to a state of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("seen", torch.zeros(ROWS, SIZE), persistent=False)

    def forward(self, x, rows):
        y = torch.tanh(self.linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)))
        self.seen.index_put_([rows], y, accumulate=True)
        return y + self.seen[rows]


class Stack(nn.Module):
    """Blocks, a value that skips all but the last one, a buffer that is filled, and an output of the first stage."""

    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(10, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(SIZE, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.0, SIZE), persistent=False)

    def forward(self, ids, rows):
        first = self.embed(ids) * self.scale
        hidden = torch.zeros_like(first)
        hidden[:, ::2] = first[:, ::2] * rows[:, None]
        for block in self.blocks:
            hidden = block(hidden, rows) + hidden
        return {
            "logits": self.head(hidden.t().t() + first) * self.scale[0],
            "early": first.t(),
            "given": rows + 1,
        }


class Tied(Stack):
    def forward(self, ids, rows):
        return super().forward(ids, rows)["logits"] @ self.head.weight @ self.embed.weight.t()


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 10, (ROWS,), generator=generator), torch.randperm(ROWS, generator=generator)


def graph_of(module):
    tensors, keyword = named_inputs(module.eval(), list(inputs()))
    states = [name for name, _ in module.named_buffers() if name.endswith(("seen", "last"))]
    return trace_graph(Step(module, tensors, keyword, states))


def by_block(ends):
    """``ends``: the last block of each stage but the last."""

    def stage_of(name):
        if name == "scale":
            return None
        if name.startswith("blocks."):
            return sum(int(name.split(".")[1]) > end for end in ends)
        return len(ends) if name.startswith("head") else 0

    return stage_of


def run_staged(staged, values, given):
    """Run the stages one after another; ``values`` holds states and weights by name, and gets the new states."""
    handed, found = {}, {}
    for graph, stage in zip(staged.graphs, staged.stages, strict=True):
        file = graph.file
        arguments = [values[spec.name] for spec in file.states] + [*given, *(handed[name] for name in stage.takes)]
        arguments += [values[spec.name] for spec in file.weights]
        results = torch.fx.Interpreter(graph.module).run(*arguments)
        outputs = dict(zip(stage.gives, results, strict=False))
        handed |= {name: value for name, value in outputs.items() if name.startswith("handed:")}
        found |= {name: value for name, value in outputs.items() if not name.startswith("handed:")}
        values |= dict(zip((spec.name for spec in file.states), results[len(stage.gives) :], strict=True))
    return found, handed


def values_of(module, graph):
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module).items()} | graph.constants


class Rewrites(Stack):
    """A later stage changes, through a view, what an earlier one has begun."""

    def forward(self, ids, rows):
        hidden = self.blocks[0](self.embed(ids) + 1, rows)
        part = hidden[:, :2]
        part += self.blocks[1](hidden, rows)[:, :2]
        return self.head(self.blocks[2](hidden, rows))


class Fills(Stack):
    """The first stage fills memory that depends on inputs only, and the last one reads it."""

    def forward(self, ids, rows):
        filled = torch.zeros(ROWS, SIZE) + rows[:, None]
        hidden = self.embed(ids)
        filled[:, 1] += hidden[:, 0]
        for block in self.blocks:
            hidden = block(hidden, rows)
        return self.head(hidden + filled)


@pytest.mark.parametrize(
    ("model", "ends"),
    [(Stack, [0, 1, 2]), (Stack, [1]), (Tied, [0, 1]), (Rewrites, [0]), (Rewrites, [0, 1]), (Fills, [0, 1, 2])],
)
def test_stages_one_after_another_compute_what_the_module_does(model, ends):
    torch.manual_seed(1)
    module = model()
    graph = graph_of(module)
    staged = split_stages(graph, by_block(ends), len(ends) + 1)
    values = values_of(module, graph)
    for seed in range(3):
        given = inputs(seed)
        with torch.no_grad():
            wanted = module(*given)
            found, handed = run_staged(staged, values, given)
        for name, value in wanted.items() if isinstance(wanted, dict) else [("output_0", wanted)]:
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
        for number, block in enumerate(module.blocks):
            torch.testing.assert_close(values[f"blocks.{number}.seen"], block.seen, rtol=1e-6, atol=1e-6)
        for spec in staged.handed:
            assert handed[spec.name].is_contiguous() and list(handed[spec.name].shape) == spec.shape


def test_each_stage_has_its_own_weights_and_states_and_computes_what_needs_inputs_only():
    staged = split_stages(graph_of(Stack()), by_block([0, 1]), 3)
    states = [[spec.name for spec in graph.file.states] for graph in staged.graphs]
    assert states == [["blocks.0.seen"], ["blocks.1.seen"], ["blocks.2.seen"]]
    weights = [{spec.name for spec in graph.file.weights} for graph in staged.graphs]
    assert weights[0] == {"embed.weight", "scale", "blocks.0.linear.weight", "blocks.0.linear.bias"}
    assert weights[1] == {"blocks.1.linear.weight", "blocks.1.linear.bias"}
    assert weights[2] == {"blocks.2.linear.weight", "blocks.2.linear.bias", "head.weight", "head.bias", "scale"}
    # The hidden state, twice, and what skips the blocks; the norm is computed by the stage that needs it.
    assert [spec.shape for spec in staged.handed] == [[ROWS, SIZE]] * 3
    assert "early" in staged.stages[0].gives and {"logits", "given"} <= set(staged.stages[2].gives)


class Remembers(Stack):
    """Its first stage reads what its last one writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(ROWS, dtype=torch.int64), persistent=False)

    def forward(self, ids, rows):
        logits = super().forward(torch.where(ids < 0, self.last[rows], ids), rows)["logits"]
        self.last.index_put_([rows], logits.argmax(-1))
        return logits


class Overwrites(Stack):
    def forward(self, ids, rows):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden += block(hidden, rows)
        return self.head(hidden)


class Corrects(Stack):
    """Its first stage changes what a later one reads before and after."""

    def forward(self, ids, rows):
        hidden = self.embed(ids) * 2
        before = self.head(hidden)
        hidden += 1
        return before * self.head(hidden)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Remembers, "stage 0 and can be used in stage 1 only, because the state 'last', which is read before it"),
        (Overwrites, "pipeline stage 0 and can be used in stage 1 only, because add"),
        (Corrects, "is handed from pipeline stage 0 to a later one, and add"),
    ],
)
def test_what_would_need_two_stages_at_once_is_refused_by_name(model, words):
    stage_of = by_block([0]) if model is not Corrects else lambda name: int(not name.startswith("embed"))
    with pytest.raises(TraceError, match=words):
        split_stages(graph_of(model()), stage_of, 2)
