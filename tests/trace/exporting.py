"""One module exported and lowered in this process, loaded with the eager backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nxd_infer import backends
from nxd_infer.backends.base import Executable
from nxd_infer.context import make_context
from nxd_infer.graph.export import Step
from nxd_infer.graph.lower import lower
from nxd_infer.graph.names import named_inputs, named_tensors
from nxd_infer.graph.stored import Lowered, write_graph


class Runtime:
    context = make_context()
    threads = 1

    def library(self, content_hash: str) -> Any:
        raise AssertionError(content_hash)


def lowered(module: nn.Module, *example: Tensor, **more: Any) -> tuple[Lowered, Step]:
    tensors, keyword = named_inputs(module.eval(), list(example))
    step = Step(module, tensors, keyword, **more)
    return lower(step, None, {})[0], step


def loaded(module: nn.Module, entry: Lowered, path: Path) -> tuple[Executable, dict[str, Tensor], dict[str, Tensor]]:
    """The graph loaded on copies of the module's tensors: executable, states, weights."""
    write_graph(entry, path)
    own = named_tensors(module)
    states = {spec.name: own[spec.name].detach().clone() for spec in entry.graph.states}
    weights = {
        spec.name: entry.constants[spec.name] if spec.name in entry.constants else own[spec.name].detach().clone()
        for spec in entry.graph.weights
    }
    return backends.get("eager").load(path, entry.graph.spec(), states, weights, Runtime()), states, weights


def operators(entry: Lowered) -> list[str]:
    return [node[0] for node in entry.ir["nodes"]]
