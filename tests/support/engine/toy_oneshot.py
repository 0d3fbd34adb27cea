"""A one-shot model whose every output tells whose input it was: per-row checksums over the live positions, and which
weights answered."""

from __future__ import annotations

import threading
import time

import torch

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, Manifest, OutputSpec
from nxd_infer.errors import ModelClosedError, RankDiedError
from tests.support.engine.toy_model import ToyWeights, toy_rank


def expected(row: torch.Tensor) -> torch.Tensor:
    """What the model says of one row of live ids: order matters, padding does not count."""
    places = torch.arange(1, row.shape[-1] + 1, dtype=torch.float64)
    return torch.stack([(row.double() * places).sum(), row.double().sum(), places.sum() * 0 + row.shape[-1]]).float()


class ToyOneShot:
    """Inputs ``input_ids`` and ``attention_mask`` [B, S]; outputs ``embedding`` [B, 3] and ``echo`` [B, S]."""

    arrays, spare_cores, lead_cores = False, 1, ()

    def __init__(self, batches=(1, 4), lengths=(8, 16), delay=0.0, pad_batch=True, requires=(), metadata=None):
        shapes = [(b, s) for b in batches for s in lengths]
        self.manifest = Manifest(
            backend="toy", tp_degree=1, graphs={}, requires=list(requires),
            buckets=[_bucket(b, s, pad_batch) for b, s in shapes],
            metadata={"task": "embed", "max_len": max(lengths), "vocab_size": 1000} if metadata is None else metadata,
        )  # fmt: skip
        self.costs = {bucket.name: 0.001 for bucket in self.manifest.buckets}
        """What an engine of a test takes the steps to cost, whatever they take."""
        self.delay, self.dead, self.restarts, self.weights = delay, False, 0, 0
        self.fail = lambda name, inputs: None
        self.calls: list[tuple[str, int]] = []
        """Bucket and number of rows with anything live in them."""
        self.running = threading.Lock()

    def run_bucket(self, name, inputs):
        if self.dead:
            raise ModelClosedError("the toy is dead")
        bucket = self.manifest.bucket(name)
        assert self.running.acquire(blocking=False), "two steps at the same time"
        try:
            self.fail(name, inputs)
            time.sleep(self.delay)
            for spec in bucket.inputs:
                assert list(inputs[spec.name].shape) == spec.shape and inputs[spec.name].dtype == spec.torch_dtype
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            self.calls.append((name, int((mask.sum(1) > 0).sum())))
            rows = [expected(row[: int(live.sum())]) + self.weights for row, live in zip(ids, mask, strict=True)]
            return {"embedding": torch.stack(rows), "echo": ids.clone()}
        finally:
            self.running.release()

    def forward(self, **inputs):
        """A call with the user's own routing: anything goes."""
        self.calls.append(("forward", inputs["input_ids"].shape[0]))
        return inputs["input_ids"].double().sum(1)

    def cut_weights(self, weights, tag=None):
        return ToyWeights(weights)

    def update_weights(self, new):
        self.weights = new.seed

    def restart(self):
        self.restarts += 1
        self.dead = False

    def health(self):
        return [toy_rank(not self.dead)]

    @property
    def failure(self):
        return RankDiedError("the toy is dead", 0) if self.dead else None


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
