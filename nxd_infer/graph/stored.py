"""A stored graph: ``graph.json`` (the specs of its tensors, in order) and ``ir.json`` (its operators).

Each weight's spec describes the plain tensor, whatever ``encoding`` a backend reads it in.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nxd_infer.artifact.manifest import GraphSpec, InputSpec, OutputSpec, TensorSpec, WeightSpec
from nxd_infer.errors import ArtifactCorruptError

GRAPH_FILE = "graph.json"
IR_FILE = "ir.json"


class GraphFile(BaseModel):
    """``graph.json``: every tensor of one graph, in the graph's order."""

    model_config = ConfigDict(extra="ignore")

    digest: str
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    states: list[TensorSpec]
    weights: list[WeightSpec]
    collectives: list[str] = Field(default_factory=list)
    ops: list[str] = Field(default_factory=list)
    """Content hashes of the operator libraries that the graph calls."""

    def spec(self) -> GraphSpec:
        """Return the entry of ``manifest.graphs``."""
        return GraphSpec(
            digest=self.digest,
            states=[s.name for s in self.states],
            weights=[w.name for w in self.weights],
            collectives=self.collectives,
        )


@dataclass
class Lowered:
    """The result of a backend's passes on one bucket's canonical graph."""

    graph: GraphFile
    """The specs, with the weight encodings that the graph reads and the libraries that it calls."""
    files: dict[str, str] = field(default_factory=dict)
    """Additional files of the backend, besides ``graph.json`` and ``ir.json``: text by file name."""
    ir: dict[str, Any] = field(default_factory=dict)
    """The canonical graph."""
    text: str = ""
    """The canonical text that was hashed for the digest; equal for ranks with equal graphs."""

    @property
    def digest(self) -> str:
        return self.graph.digest


def ir_text(ir: dict[str, Any]) -> str:
    """Return the canonical text: equal for equal graphs, one node per line."""
    compact: dict[str, Any] = {"sort_keys": True, "separators": (",", ":"), "allow_nan": False}
    lines = ",\n".join(json.dumps(node, **compact) for node in ir["nodes"])
    rest = {key: value for key, value in ir.items() if key != "nodes"}
    return f'{json.dumps(rest, **compact)[:-1]},"nodes":[\n{lines}\n]}}\n'


def write_graph(lowered: Lowered, graph_dir: str | os.PathLike[str]) -> Path:
    """Write ``graph.json``, ``ir.json`` (the canonical graph) and the backend's files."""
    path = Path(graph_dir)
    path.mkdir(parents=True, exist_ok=True)
    (path / IR_FILE).write_text(ir_text(lowered.ir), encoding="utf-8")
    for name, text in lowered.files.items():
        (path / name).write_text(text, encoding="utf-8")
    (path / GRAPH_FILE).write_text(lowered.graph.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return path


def read_graph(graph_dir: str | os.PathLike[str], digest: str | None = None) -> GraphFile:
    """Read ``graph.json``. Raises ArtifactCorruptError if it is missing, invalid, or has another digest."""
    path = Path(graph_dir) / GRAPH_FILE
    try:
        graph = GraphFile.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactCorruptError(f"{path} cannot be read: {error}") from error
    if digest is not None and graph.digest != digest:
        raise ArtifactCorruptError(f"{path} is graph {graph.digest}, expected {digest}")
    return graph


def read_ir(graph_dir: str | os.PathLike[str], name: str = IR_FILE) -> dict[str, Any]:
    """Read ``ir.json``, or another graph. Raises ArtifactCorruptError if it is missing or not a graph."""
    path = Path(graph_dir) / name
    try:
        ir = json.loads(path.read_bytes())
        if not {"inputs", "nodes", "outputs"} <= ir.keys():
            raise ValueError("it is not a graph")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ArtifactCorruptError(f"{path} cannot be read: {error}") from error
    return ir
