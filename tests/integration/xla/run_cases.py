"""``python -m tests.integration.xla.run_cases DIRECTORY``: run every graph below it from its HLO, on replicas here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from nxd_infer.backends.base import RankGraph
from nxd_infer.backends.hlo.placement import Cell
from nxd_infer.backends.xla.backend import BACKEND
from nxd_infer.graph.stored import read_graph
from nxd_infer.runtime.rank_process.rank import Runtime


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest between numbers; infinite where whole numbers or types differ."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return float("inf")
        if not a.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(a, b) else float("inf"))
        elif not torch.equal(a, b):  # equal infinities have no difference
            worst = max(worst, float((a.double() - b.double()).abs().max().nan_to_num(float("inf"))))
    return worst


def run_case(directory: Path) -> dict[str, float]:
    """The largest difference of the first rank's outputs, and of every rank's states."""
    content = torch.load(directory / "tensors.pt")
    graph_dir = directory / "graphs" / "0"
    graph = read_graph(graph_dir)
    places = [
        ({name: Cell(tensor) for name, tensor in states.items()}, {name: Cell(t) for name, t in weights.items()})
        for states, weights in zip(content["states"], content["weights"], strict=True)
    ]
    ranks = [RankGraph(graph_dir, graph.spec(), states, weights) for states, weights in places]
    executable = BACKEND.load(ranks, Runtime(None, 1, None))  # type: ignore[arg-type]  # no operator of a library
    count, outputs, kept = len(graph.outputs), 0.0, 0.0
    for step, inputs in enumerate(content["steps"]):
        outputs = max(outputs, difference(executable(inputs), content["expected"][0][step][:count]))
    for rank, (states, _) in enumerate(places):
        wanted = dict(zip(graph.spec().states, content["expected"][rank][-1][count:], strict=True))
        own = [name for name in wanted if rank == 0 or states[name].value.device.type != "cpu"]
        kept = max(kept, difference([states[name].on_host() for name in own], [wanted[name] for name in own]))
    return {"outputs": outputs, "states": kept}


if __name__ == "__main__":
    found = {place.name: run_case(place) for place in sorted(Path(sys.argv[1]).iterdir())}
    import torch_xla.debug.metrics as metrics

    assert not {"nxd_models", "nxd_server"} & {name.split(".")[0] for name in sys.modules}, "there is model code here"
    compiled = metrics.metric_data("CompileTime")
    print(json.dumps({"cases": found, "compiled": compiled[0] if compiled else 0}))
    sys.stdout.flush()
    os._exit(0)
