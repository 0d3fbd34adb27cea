"""A one-shot model whose every output tells whose input it was: per-row checksums over the live positions, and which
weights answered."""

from __future__ import annotations

import torch

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, Manifest, OutputSpec
from tests.support.engine.toy_model import Toy


def expected(row: torch.Tensor) -> torch.Tensor:
    """What the model says of one row of live ids: order matters, padding does not count."""
    places = torch.arange(1, row.shape[-1] + 1, dtype=torch.float64)
    return torch.stack([(row.double() * places).sum(), row.double().sum(), places.sum() * 0 + row.shape[-1]]).float()


class ToyOneShot(Toy):
    """Inputs ``input_ids`` and ``attention_mask`` [B, S]; outputs ``embedding`` [B, 3] and ``echo`` [B, S]."""

    arrays = False

    def __init__(self, batches=(1, 4), lengths=(8, 16), delay=0.0, pad_batch=True, requires=(), metadata=None):
        super().__init__(delay)
        shapes = [(b, s) for b in batches for s in lengths]
        self.manifest = Manifest(
            backend="toy", tp_degree=1, graphs={}, requires=list(requires),
            buckets=[_bucket(b, s, pad_batch) for b, s in shapes],
            metadata={"task": "embed", "max_len": max(lengths), "vocab_size": 1000} if metadata is None else metadata,
        )  # fmt: skip
        self.costs = {bucket.name: 0.001 for bucket in self.manifest.buckets}
        """What an engine of a test takes the steps to cost, whatever they take."""
        self.calls: list[tuple[str, int]] = []
        """Bucket and number of rows with anything live in them, of every step that had one."""

    def run_bucket(self, name, inputs):
        with self.taking(name, inputs):
            for spec in self.manifest.bucket(name).inputs:
                assert list(inputs[spec.name].shape) == spec.shape and inputs[spec.name].dtype == spec.torch_dtype
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            if live := int((mask.sum(1) > 0).sum()):
                self.calls.append((name, live))
            rows = [expected(row[: int(live.sum())]) + self.weights for row, live in zip(ids, mask, strict=True)]
            return {"embedding": torch.stack(rows), "echo": ids.clone()}

    def forward(self, **inputs):
        """A call with the user's own routing: anything goes."""
        self.calls.append(("forward", inputs["input_ids"].shape[0]))
        return inputs["input_ids"].double().sum(1)


def _bucket(batch, length, pad_batch):
    pad = {1: 0} | ({0: 0} if pad_batch else {})
    cut = {0: ("input_ids", 0)} if pad_batch else {}
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return BucketSpec(
        name=f"b{batch}_s{length}",
        inputs=[
            InputSpec.of("input_ids", ids, pad=pad, minimum=0, maximum=999),
            InputSpec.of("attention_mask", ids, pad=pad),
        ],
        outputs=[
            OutputSpec.of("embedding", torch.zeros(batch, 3), cut=cut),
            OutputSpec.of("echo", ids, cut=cut | {1: ("input_ids", 1)}),
        ],
        graphs=["toy"],
    )
