"""Small artifacts, written without tracing: ``y = all_reduce(x @ up @ down)``, with a state ``count`` that grows with
every call of every bucket, a state ``memory`` that does not start as zeros, and a constant ``shift`` of each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import nxd_infer.comm.ops  # noqa: F401  (registers torch.ops.nxd)
from nxd_infer.artifact.manifest import (
    BUCKET_KERNEL_NAME,
    BucketSpec,
    InputSpec,
    Manifest,
    OutputSpec,
    TensorSpec,
    WeightSpec,
    weight_name,
    weight_schema_hash,
)
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.backends.cpu.lower import PROGRAM_FILE
from nxd_infer.graph import ir
from nxd_infer.graph.passes import functional
from nxd_infer.graph.stored import GRAPH_FILE, IR_FILE, GraphFile, ir_text
from nxd_infer.layout import AxisPlan, ParamLayout, shard_tensor
from nxd_infer.trace.ranks.traced import describe_layout
from nxd_infer.util.machine import architecture, versions

HIDDEN, INNER, VOCABULARY = 8, 16, 12
LAYOUTS = {
    "up": ParamLayout.of([HIDDEN, AxisPlan.even(INNER)], "up"),
    "down": ParamLayout.of([AxisPlan.even(INNER), HIDDEN], "down"),
    "table": ParamLayout.of([VOCABULARY, HIDDEN], "table"),
}


@dataclasses.dataclass
class Bucket:
    """One shape of the toy model: ``x`` is [batch, length, HIDDEN]; ``ids`` [batch] looks rows up in a table."""

    name: str
    batch: int
    length: int


BUCKETS = (Bucket("b2_s4", 2, 4), Bucket("b2_s8", 2, 8), Bucket("b4_s8", 4, 8))


def logical_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "up": torch.randn(HIDDEN, INNER, generator=generator),
        "down": torch.randn(INNER, HIDDEN, generator=generator),
        "table": torch.randn(VOCABULARY, HIDDEN, generator=generator),
    }


def expected(weights: dict[str, Tensor], x: Tensor, ids: Tensor | None = None) -> Tensor:
    """What the toy model returns as ``y``."""
    ids = torch.zeros(x.shape[0], dtype=torch.int64) if ids is None else ids
    return x @ weights["up"] @ weights["down"] + weights["table"][ids][:, None, :]


def close_to(y: Tensor, want: Tensor) -> bool:
    """Whether it is what was expected, but for rounding."""
    return y.shape == want.shape and bool((y - want).abs().max() <= 1e-5 * want.abs().max())


def _graph(degree: int, bucket: Bucket) -> Callable[..., tuple[Tensor, ...]]:
    def step(
        count: Tensor, memory: Tensor, x: Tensor, ids: Tensor, up: Tensor, down: Tensor, table: Tensor, shift: Tensor
    ):
        row = torch.nn.functional.embedding(ids + shift, table).unsqueeze(1)
        y = torch.matmul(torch.matmul(x, up), down)
        if degree > 1:
            y = torch.ops.nxd.all_reduce(y, "tp", "sum", degree)
        y = y + row
        count.add_(1)
        memory.add_(1)
        return y, count.clone(), memory.clone()

    return step


def build(
    target: str | Path,
    *,
    degree: int = 2,
    buckets: Sequence[Bucket] = BUCKETS,
    weights: dict[str, Tensor] | None = None,
    kernel: Callable | None = None,
    shifts: dict[int, int] | None = None,
    pad: bool = True,
    change: Callable[[Manifest], None] | None = None,
    ops: Sequence[Path] = (),
) -> Path:
    """Write the toy artifact. ``shifts`` makes single ranks add to their ids; ``change`` edits the manifest.
    ``ops``: native libraries to put in."""
    logical = weights or logical_weights()
    states = [TensorSpec.of("count", torch.zeros(1)), TensorSpec.of("memory", torch.zeros(3))]
    shards = [
        {name: shard_tensor(logical, LAYOUTS[name].rank_layout(degree, rank)) for name in logical}
        for rank in range(degree)
    ]
    for rank, shard in enumerate(shards):
        shard["shift"] = torch.tensor([(shifts or {}).get(rank, 0)])
    specs = [WeightSpec.of(name, tensor) for name, tensor in shards[0].items()]
    with ArtifactWriter(target) as writer:
        bucket_specs, graphs = [], {}
        for number, bucket in enumerate(buckets):
            x = torch.zeros(bucket.batch, bucket.length, HIDDEN)
            ids = torch.zeros(bucket.batch, dtype=torch.int64)
            inputs = [
                InputSpec.of("x", x, pad={0: 0.0, 1: 0.0} if pad else {}),
                InputSpec.of("ids", ids, default=0, pad={0: 0.0} if pad else {}),
            ]
            outputs = [
                OutputSpec.of("y", x, cut={0: ("x", 0), 1: ("x", 1)}),
                OutputSpec.of("count", torch.zeros(1)),
                OutputSpec.of("memory", torch.zeros(3)),
            ]
            arguments = [torch.zeros(1), torch.zeros(3), x, ids, *shards[0].values()]
            traced = make_fx(_graph(degree, bucket), tracing_mode="fake")(*arguments)
            digest = f"toy{number}degree{degree}"
            graph = GraphFile(digest=digest, inputs=inputs, outputs=outputs, states=states, weights=specs)
            folder = f"graphs/{digest}"
            writer.write_bytes(f"{folder}/{GRAPH_FILE}", graph.model_dump_json().encode())
            writer.write_bytes(f"{folder}/{PROGRAM_FILE}", ir_text(ir.graph_to_ir(traced)).encode())
            canonical = ir.graph_to_ir(functional(traced, len(states)), ir.FUNCTIONAL)
            writer.write_bytes(f"{folder}/{IR_FILE}", ir_text(canonical).encode())
            graphs[digest] = graph.spec()
            bucket_specs.append(
                BucketSpec(
                    name=bucket.name,
                    inputs=inputs,
                    outputs=outputs,
                    graphs=[digest] * degree,
                    structure={"dict": [[name, name] for name in ("y", "count", "memory")]},
                )
            )
        for rank, shard in enumerate(shards):
            initial = {"state:memory": torch.tensor([1.0, 2.0, 3.0])}
            writer.write_safetensors(weight_name(rank), {**shard, **initial})
        for file in ops:
            writer.add(f"ops/{file.name}", file)
        if kernel is not None:
            writer.write_bytes(BUCKET_KERNEL_NAME, torch.jit.script(kernel).save_to_buffer())
        manifest = Manifest(
            backend="eager",
            requires=["bucket-kernel"] if kernel is not None else [],
            ops=[file.stem for file in ops],
            target={"arch": architecture(), "threads": 1},
            versions=versions(),
            tp_degree=degree,
            buckets=bucket_specs,
            graphs=graphs,
            states=states,
            weights=specs,
            weight_schema=weight_schema_hash(specs),
            layout={"weights": describe_layout(LAYOUTS, degree)},
            metadata={"task": "toy"},
        )
        if change is not None:
            change(manifest)
        return writer.commit(manifest)
