"""Which one-shot requests may share a step, and which can run at all, from the manifest's declarations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from nxd_infer.artifact.manifest import BUCKET_KERNEL_REQUIREMENT, BucketSpec, Manifest
from nxd_infer.errors import InputMismatchError
from nxd_infer.runtime.router import fits


def batches_rows(manifest: Manifest) -> bool:
    """Whether the manifest declares rows independent: dimension 0 of every input is padded and of every output cut.

    A model with a bucket kernel or with its own states never batches.
    """
    if manifest.states or BUCKET_KERNEL_REQUIREMENT in manifest.requires or not manifest.buckets:
        return False
    for bucket in manifest.buckets:
        if not bucket.inputs or any(0 not in spec.pad for spec in bucket.inputs):
            return False
        if len({spec.shape[0] for spec in bucket.inputs}) != 1:
            return False
        names = {spec.name for spec in bucket.inputs}
        for spec in bucket.outputs:
            source = spec.cut.get(0)
            if source is None or source[0] not in names or source[1] != 0:
                return False
    return True


def check_rows(inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise InputMismatchError if the inputs of one request differ in their number of rows."""
    rows = {name: tensor.shape[0] for name, tensor in inputs.items()}
    if len(set(rows.values())) > 1:
        given = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise InputMismatchError(f"the inputs of one call have the same number of rows, got {given}")


def bucket_fits(bucket: BucketSpec, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether ``bucket`` takes these inputs, after any declared padding."""
    names = {spec.name for spec in bucket.inputs}
    if not inputs.keys() <= names:
        return False
    return all(
        fits(spec, inputs[spec.name]) if spec.name in inputs else spec.default is not None for spec in bucket.inputs
    )


def row_shape(bucket: BucketSpec) -> tuple:
    """Return the shape that buckets have in common if they differ only in batch size."""
    return tuple((spec.name, spec.dtype, tuple(spec.shape[1:])) for spec in bucket.inputs)


def row_elements(bucket: BucketSpec) -> int:
    """Return the number of input elements per row."""
    return sum(math.prod(spec.shape[1:]) for spec in bucket.inputs)
