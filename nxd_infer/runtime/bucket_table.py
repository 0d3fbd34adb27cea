"""An artifact's buckets as text, for messages."""

from __future__ import annotations

from collections.abc import Sequence

from nxd_infer.artifact.manifest import BucketSpec, InputSpec


def bucket_table(buckets: Sequence[BucketSpec]) -> str:
    """Format the buckets, one per line; dimensions that may be smaller are marked ``<=``."""
    width = max((len(bucket.name) for bucket in buckets), default=0)
    lines = []
    for bucket in buckets:
        inputs = ", ".join(f"{spec.name}: {spec.dtype}{shape_text(spec)}" for spec in bucket.inputs)
        lines.append(f"  {bucket.name:<{width}}  {inputs}")
    return "\n".join(lines)


def shape_text(spec: InputSpec) -> str:
    """Return the allowed shape of an input: ``[1, <=128]``."""
    return "[" + ", ".join(f"<={size}" if dim in spec.pad else str(size) for dim, size in enumerate(spec.shape)) + "]"
