"""Files of an artifact: its manifest, its graphs, its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from nxd_infer.artifact.manifest import MANIFEST_NAME, WeightSpec
from nxd_infer.artifact.rank_weights import load_weights
from nxd_infer.artifact.writer import CHECKSUM_KEY, manifest_bytes, manifest_checksum
from nxd_infer.backends.cpu import program
from nxd_infer.errors import ArtifactCorruptError, ArtifactError, CheckpointError
from nxd_infer.graph.canonical import stored_graph
from nxd_infer.graph.ir import graph_to_ir, ir_to_graph
from nxd_infer.graph.stored import GRAPH_FILE, IR_FILE, ir_text, read_graph, read_ir
from nxd_infer.layout.sources import SafetensorsSource
from nxd_infer.runtime.load import load_artifact
from tests.fuzz.mutations import SAFETENSORS
from tests.fuzz.target import Target, object_with
from tests.support import toy_artifacts as toy


def _sealed(data: bytes) -> bytes:
    """With the manifest's own checksum corrected, as an attacker could do, too."""
    try:
        fields = json.loads(data)
        fields[CHECKSUM_KEY] = manifest_checksum(fields)
        return json.dumps(fields).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data


def manifest(place: Path) -> Target:
    """What is read of an artifact before its graphs are; what was accepted says the same when it is written again."""
    root = toy.build(place / "artifact", degree=1, buckets=toy.BUCKETS[:2])
    made = (root / MANIFEST_NAME).read_bytes()

    def read(data: bytes) -> None:
        (root / MANIFEST_NAME).write_bytes(_sealed(data))
        found = load_artifact(root, runs_here=False).manifest
        (root / MANIFEST_NAME).write_bytes(manifest_bytes(found))
        again = load_artifact(root, runs_here=False).manifest
        assert again == found

    return Target("manifest", read, (ArtifactError,), [made])


def graph(place: Path) -> Target:
    """A graph's IR, as it is read for running and for passes over it; what was accepted can be stored again."""
    root = toy.build(place / "artifact", degree=1, buckets=toy.BUCKETS[:1])
    (folder,) = (root / "graphs").iterdir()
    made = dict(zip(("graph", "ir"), ((folder / name).read_bytes() for name in (GRAPH_FILE, IR_FILE)), strict=True))

    def read(data: bytes) -> None:
        both: Any = json.loads(data)
        for name, file in (("graph", GRAPH_FILE), ("ir", IR_FILE)):
            (folder / file).write_text(json.dumps(both[name]))
        ir = read_ir(folder)
        program.load(ir)
        again = graph_to_ir(ir_to_graph(ir))
        assert ir_text(graph_to_ir(ir_to_graph(again))) == ir_text(again)
        read_graph(folder)
        stored_graph(folder)

    example = json.dumps({name: json.loads(text) for name, text in made.items()}).encode()
    return Target("graph", object_with(read, "graph", "ir"), (ArtifactCorruptError,), [example])


def weights(place: Path) -> Target:
    """A safetensors file, as a source of weights and as a rank's own."""
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, 4, dtype=torch.int64), "c": torch.tensor(True)}
    specs = [WeightSpec.of(name, tensor) for name, tensor in tensors.items()]
    file = place / "weights.safetensors"

    def read_all(path: Path) -> dict[str, list[Tensor]]:
        source, found = SafetensorsSource(path), {}
        try:
            for name in list(source.keys()):
                shape, dtype = source.shape(name), source.dtype(name)
                whole = source.read(name)
                assert (tuple(whole.shape), whole.dtype) == (shape, dtype)
                found[name] = [whole]
                if shape:
                    found[name].append(source.read(name, [slice(0, (size + 1) // 2) for size in shape]))
        finally:
            source.close()
        return found

    def read(data: bytes) -> None:
        file.write_bytes(data)
        read_all(file)
        load_weights(file, specs)

    return Target("weights", read, (CheckpointError, ArtifactCorruptError), [save(tensors)], form=SAFETENSORS)
