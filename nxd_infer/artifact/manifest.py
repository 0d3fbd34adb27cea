"""``manifest.json``: the contents of an artifact. Written last, read first, parsed completely or rejected.

Format versions are ``major.minor``: a reader rejects another major and ignores unknown fields of a higher minor;
``requires`` lists features that a reader must know by name, whatever the version.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nxd_infer.errors import InputRangeError
from nxd_infer.util.dtypes import ITEM_BYTES, LARGEST_FLOAT, dtype_name, dtype_of

if TYPE_CHECKING:
    import torch

FORMAT = "2.0"
BUCKET_KERNEL_REQUIREMENT = "bucket-kernel"
INLINE_WEIGHTS_REQUIREMENT = "inline-weights"
PACKED_FILES_REQUIREMENT = "packed-files"
PACKED_REQUIREMENT = "packed-weights"
PIPELINE_REQUIREMENT = "pipeline"
WEIGHTS_LATER_REQUIREMENT = "weights-later"
"""The weights are zeros until ``update_weights`` gives them: nothing runs before."""
WHOLE_PROMPTS_REQUIREMENT = "whole-prompts"
KNOWN_REQUIREMENTS: frozenset[str] = frozenset(
    {
        "blake3",  # artifacts used to say how their files are hashed
        BUCKET_KERNEL_REQUIREMENT,
        INLINE_WEIGHTS_REQUIREMENT,
        PACKED_FILES_REQUIREMENT,
        PACKED_REQUIREMENT,
        PIPELINE_REQUIREMENT,
        WEIGHTS_LATER_REQUIREMENT,
        WHOLE_PROMPTS_REQUIREMENT,
    }
)
MANIFEST_NAME = "manifest.json"
BUCKET_KERNEL_NAME = "bucket_kernel.pt"
"""The user's bucket kernel as TorchScript; it exists if ``requires`` lists ``bucket-kernel``.

Write it with ``writer.write_bytes(BUCKET_KERNEL_NAME, kernel.save_to_buffer())``: on a full disk, ``torch.jit.save``
to a path aborts the whole process.
"""


def weight_name(rank: int) -> str:
    return f"weights/rank_{rank:02d}.safetensors"


class _Model(BaseModel):
    # JSON has no infinities and pydantic would write null, but masks are padded with -inf
    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings")


class TensorSpec(_Model):
    """Name, dtype, shape and stride of one tensor of a graph; the runtime checks all four at every call."""

    name: str
    dtype: str
    shape: list[int]
    stride: list[int]

    @model_validator(mode="after")
    def _check(self):
        numbers = [*self.shape, *self.stride, self.nbytes]
        if len(self.shape) != len(self.stride) or min(numbers) < 0 or max(numbers) >= 1 << 62:
            raise ValueError(f"no tensor has the shape {self.shape} with the strides {self.stride}")
        return self

    def _check_dimensions(self, what: str, dimensions: Iterable[int]) -> None:
        for dim in dimensions:
            if not 0 <= dim < len(self.shape):
                raise ValueError(
                    f"{what} names dimension {dim} of {self.name!r}, which has {len(self.shape)}, counted from 0"
                )

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, **more: Any):
        return cls(
            name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), stride=list(tensor.stride()), **more
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this shape."""
        count = 1
        for size in self.shape:
            count *= size
        return count * (ITEM_BYTES.get(self.dtype) or self.torch_dtype.itemsize)


def _check_fits(value: float, spec: TensorSpec) -> None:
    """Raise ValueError unless the dtype of ``spec`` can hold ``value``."""
    low, high = _limits(spec)
    fits = low <= value <= high
    if isinstance(high, float):  # a mask is padded with -inf
        fits = fits or value != value or value in (math.inf, -math.inf)
    if not fits:
        raise ValueError(
            f"{spec.name!r} is {spec.dtype}, which holds {low} to {high}, and is to be filled with "
            f"{value}: give a value in that range"
        )


def _limits(spec: TensorSpec) -> tuple[float, float]:
    """Return the smallest and the largest number that the dtype of ``spec`` can hold."""
    name = spec.dtype
    if name in LARGEST_FLOAT:
        return -LARGEST_FLOAT[name], LARGEST_FLOAT[name]
    if name in ITEM_BYTES and name != "bool":
        bits = 8 * ITEM_BYTES[name]
        return (0, (1 << bits) - 1) if name.startswith("u") else (-1 << bits - 1, (1 << bits - 1) - 1)
    if name == "bool" or spec.torch_dtype.is_complex:
        return -math.inf, math.inf
    import torch

    dtype = spec.torch_dtype
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min, limits.max


class InputSpec(TensorSpec):
    """A graph input. ``pad`` maps a dimension to the value that pads it to the bucket's size."""

    role: str = ""
    default: float | None = None
    """Value of the full tensor if a caller omits the input."""
    pad: dict[int, float] = Field(default_factory=dict)
    minimum: int | float | None = None
    maximum: int | float | None = None
    """Smallest and largest allowed element, if the model declares them. The caller's process checks them, because a
    graph would read the wrong row, or memory outside the table, for an index out of range."""

    @model_validator(mode="after")
    def _check_fills(self):
        self._check_dimensions("pad", self.pad)
        for value in [*self.pad.values(), *([] if self.default is None else [self.default]), self.nearest_to_zero()]:
            _check_fits(value, self)
        return self

    def nearest_to_zero(self) -> float:
        """The value in the declared range that is nearest to zero, for runs without a request."""
        value = 0 if self.minimum is None else max(0, self.minimum)
        return value if self.maximum is None else min(value, self.maximum)

    def allows(self, value: float) -> bool:
        """Whether an element may be ``value``; NaN is outside every range."""
        return (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)

    def check(self, value: float) -> None:
        """Raise InputRangeError unless an element may be ``value``."""
        if not self.allows(value):
            low, high = self.minimum, self.maximum
            limits = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
            raise InputRangeError(f"input {self.name!r} holds the value {value}; it must be {limits}", self.name)


class OutputSpec(TensorSpec):
    """A graph output. ``cut`` maps a dimension to ``[input name, input dimension]``, to whose size it is cut."""

    role: str = ""
    cut: dict[int, tuple[str, int]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_cut(self):
        self._check_dimensions("cut", self.cut)
        return self


class WeightSpec(TensorSpec):
    """A tensor that graphs read and never write: ``parameter``, ``buffer`` or ``constant``; by name in rank files."""

    kind: str = "parameter"
    encoding: str = ""
    """The form in which graphs read it, one of the backend's. A rank encodes it at load, unless its file holds it so
    (``Manifest.packed``)."""


class GraphSpec(_Model):
    """One compiled graph under ``graphs/<digest>/`` and the names of its arguments, in order."""

    digest: str
    states: list[str]
    weights: list[str]
    collectives: list[str] = Field(default_factory=list)
    """The collective calls in order, as text; an artifact is rejected unless they are equal on all ranks."""


class StageSpec(_Model):
    """One pipeline stage of a bucket."""

    takes: list[str] = Field(default_factory=list)
    """The values that its graphs take after the bucket's inputs; earlier stages have computed them."""
    gives: list[str] = Field(default_factory=list)
    """What its graphs return, in order: values for later stages, and outputs of the bucket."""


class BucketSpec(_Model):
    """One traced shape. ``graphs[rank]`` is the digest of the graph of rank ``rank``."""

    name: str
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    graphs: list[str]
    stages: list[StageSpec] = Field(default_factory=list)
    """One per pipeline stage; empty without a pipeline."""
    handed: list[TensorSpec] = Field(default_factory=list)
    """The values that stages hand to later ones. Each rank hands its own to the rank in its place there."""
    structure: Any = None
    """The form of the model's return value, see ``artifact.structure``: ``"output_0"`` for a bare tensor, ``{"tuple":
    ["output_0", "output_1"]}`` for a tuple of two. None: a tuple of all outputs."""
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_cuts(self):
        sizes = {spec.name: len(spec.shape) for spec in self.inputs}
        for output in self.outputs:
            for name, dim in output.cut.values():
                if not 0 <= dim < sizes.get(name, 0):
                    raise ValueError(f"{output.name!r} is cut to dimension {dim} of {name!r}, which is not there")
        return self


class FileSpec(_Model):
    """Size and checksum of a file, in hexadecimal."""

    size: int
    blake3: str = Field(min_length=1)


class Manifest(_Model):
    """The content of ``manifest.json``."""

    format: str = FORMAT
    requires: list[str] = Field(default_factory=list)
    backend: str
    target: dict[str, Any] = Field(default_factory=dict)
    """What the compiled code needs of a machine, in its backend's words."""
    versions: dict[str, str] = Field(default_factory=dict)
    """What made it: ``torch``, ``python``, and ``compiler`` with its version where graphs were compiled."""
    tp_degree: int
    pp_degree: int = 1
    """Number of pipeline stages. Rank ``r`` has stage ``r // tp_degree`` and tensor parallel rank ``r % tp_degree``."""
    buckets: list[BucketSpec]
    graphs: dict[str, GraphSpec]
    states: list[TensorSpec] = Field(default_factory=list)
    """Per-rank shapes; equal on all ranks of a stage (:meth:`of_rank`). Initially zero unless the rank's weight file
    holds ``state:<name>``."""
    weights: list[WeightSpec] = Field(default_factory=list)
    packed: list[TensorSpec] = Field(default_factory=list)
    """The weights that rank files hold in their encodings, as they are there; others are there plain."""
    weight_schema: str = ""
    """Hash of the names, dtypes, shapes and strides of ``weights``; checked by ``update_weights``."""
    layout: dict[str, Any] = Field(default_factory=dict)
    """How the weights of each tensor parallel rank are assembled from logical tensors, so that new ones can be
    sharded; ``unread``: the model's other logical tensors."""
    ops: list[str] = Field(default_factory=list)
    """Operator libraries under ``ops/`` that the graphs call, by content hash."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Metadata for a server: ``task``, limits, model name. It does not change any graph."""
    files: dict[str, FileSpec] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_layout(self):
        if min(self.tp_degree, self.pp_degree, len(self.buckets)) < 1:
            raise ValueError(f"tp degree {self.tp_degree}, pp degree {self.pp_degree} and {len(self.buckets)} buckets")
        entries = self.layout.get("weights", {})
        for name, entry in entries.items() if isinstance(entries, dict) else [("weights", entries)]:
            logical, ranks = (entry.get("logical"), entry.get("ranks") or []) if isinstance(entry, dict) else (None, [])
            parts = [ranks, *(logical.values() if isinstance(logical, dict) else [None])]
            if not all(isinstance(part, list) for part in parts) or len(ranks) != self.tp_degree:
                raise ValueError(f"the layout does not say what {name!r} is made of on {self.tp_degree} ranks")
        unread = self.layout.get("unread", [])
        if not isinstance(unread, list) or not all(isinstance(name, str) for name in unread):
            raise ValueError("the layout's 'unread' is not a list of names")
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp_degree * self.tp_degree

    @property
    def stored(self) -> list[TensorSpec]:
        """How a rank's file holds each of ``weights``."""
        packed = {spec.name: spec for spec in self.packed}
        return [packed.get(spec.name, spec) for spec in self.weights]

    def of_rank(self, rank: int) -> Manifest:
        """Return the manifest with only the states and weights of the rank's stage: those that its graphs use."""
        if self.pp_degree == 1:
            return self
        first = rank // self.tp_degree * self.tp_degree
        digests = {digest for bucket in self.buckets for digest in bucket.graphs[first : first + self.tp_degree]}
        graphs = [self.graphs[digest] for digest in digests]
        states = {name for graph in graphs for name in graph.states}
        weights = {name for graph in graphs for name in graph.weights}
        return self.model_copy(
            update={
                "states": [spec for spec in self.states if spec.name in states],
                "weights": [spec for spec in self.weights if spec.name in weights],
            }
        )

    def bucket(self, name: str) -> BucketSpec:
        for bucket in self.buckets:
            if bucket.name == name:
                return bucket
        raise KeyError(name)


def weight_schema_hash(weights: list[WeightSpec]) -> str:
    """Return the hash of names, dtypes, shapes and strides, ordered by name."""
    rows = sorted((w.name, w.dtype, w.shape, w.stride) for w in weights)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
