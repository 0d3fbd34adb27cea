"""Graphs of every family, lowered and written for a process that has nothing else of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_infer.backends.hlo.files import BODY_FILE, HLO_FILE, PARTS_FILE, HloFile, PartsFile, read
from nxd_infer.backends.hlo.lower import Look, lower_directory
from nxd_infer.backends.hlo.module import Module
from nxd_infer.backends.hlo.parts import lower_graphs
from nxd_infer.backends.neuron import lint
from nxd_infer.backends.neuron.lower import aliases_of
from nxd_infer.graph.canonical import configuration, name_lowered
from nxd_infer.graph.stored import IR_FILE, read_graph, write_graph
from tests.support.backends.canonical import Rank, ranks_of, run_whole, steps_of
from tests.support.tiny_models import DECODERS

PREFILL = {"bucket": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{family} decode": (family, {}) for family in DECODERS},
    **{f"{family} prefill": (family, PREFILL) for family in DECODERS},
    **{family: (family, {}) for family in ("bert", "roberta", "bert_classifier")},
    "adapters decode": ("llama", {"lora_slots": 2, "lora_rank": 2}),
    "adapters prefill": ("llama", {"lora_slots": 2, "lora_rank": 2, **PREFILL}),
    "guesses verify": ("llama", {"speculate": 2, "bucket": 2}),
}


@dataclass
class Case:
    """One graph of all ranks."""

    hlo: list[str]
    """The digest of each rank's HLO."""
    table: HloFile
    aliases: dict[int, int]
    """Which result would take which parameter's memory on a NeuronCore."""
    findings: list[lint.Finding]
    """Limits of Neuron's that it breaks."""


def lower(rank: Rank, directory: Path, look: Look = lambda module, table: None) -> HloFile:
    """Lower one rank's graph in this process."""
    (lowered,) = lower_graphs([rank.graph])
    name_lowered(lowered, rank.graph, configuration("xla", {}))
    return lower_directory(write_graph(lowered, directory), look)


def write_case(name: str, degree: int, directory: Path, root: Path) -> Case:
    """The case of that name; see :func:`write_ranks`."""
    family, options = CASES[name]
    return write_ranks(ranks_of(family, degree, root, **options), directory)


def write_ranks(ranks: list[Rank], directory: Path) -> Case:
    """Lower every rank, and leave the first one's HLO, with three steps and what they should give, in ``directory``."""
    places = [directory / "graphs" / str(rank) for rank in range(len(ranks))]
    aliases: dict[int, int] = {}
    findings: list[lint.Finding] = []

    def look(module: Module, table: HloFile) -> None:
        aliases.update(aliases_of(read_graph(places[0]), read(places[0], PARTS_FILE, PartsFile), table))
        findings.extend(lint.findings(module, aliases))

    tables = [lower(ranks[0], places[0], look), *map(lower, ranks[1:], places[1:])]
    digests = [hashlib.sha256((place / HLO_FILE).read_bytes()).hexdigest() for place in places]
    for place in places:
        for file in (IR_FILE, BODY_FILE):
            (place / file).unlink()
    file = ranks[0].graph.file
    content = {
        "states": [dict(zip((s.name for s in file.states), rank.states, strict=True)) for rank in ranks],
        "weights": [dict(zip((s.name for s in file.weights), rank.weights, strict=True)) for rank in ranks],
        "steps": steps_of(ranks[0]),
        "expected": run_whole(ranks),
    }
    torch.save(content, directory / "tensors.pt")
    return Case(digests, tables[0], aliases, findings)
