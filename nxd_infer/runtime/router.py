"""Choose the bucket of a call, and fit the call's inputs to its shapes.

A user's bucket kernel is used as it is. Without one, a bucket *fits* if every input has the traced dtype and number of
dimensions, and every dimension is equal to the traced one or, if the manifest declares a pad value for it, smaller. Of
the buckets that fit, the smallest runs (fewest input elements; among equals the first in the manifest), so a length
equal to a bucket runs in that bucket. Undeclared dimensions are never padded: a model without masks mixes rows and
positions, so padding would silently change its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import BucketSpec, InputSpec
from nxd_infer.errors import BucketError, InputMismatchError, InputRangeError, NxdError
from nxd_infer.runtime.rank_model import bucket_table, shape_text
from nxd_infer.util.devices import on_host
from nxd_infer.util.dtypes import dtype_name

BucketKernel = Callable[[list[Tensor]], tuple[list[Tensor], Tensor | int]]


@dataclass(frozen=True)
class Route:
    """A bucket's index, and the caller's inputs by name; missing ones take their default."""

    bucket: int
    inputs: Mapping[str, Tensor]


class Router:
    """Routes the calls of one artifact."""

    def __init__(self, buckets: Sequence[BucketSpec], kernel: BucketKernel | None = None):
        self.buckets = list(buckets)
        self.kernel = kernel
        self._by_size = sorted(range(len(self.buckets)), key=lambda i: (elements(self.buckets[i]), i))

    def route(self, positional: Sequence[Any], named: Mapping[str, Any]) -> Route:
        """Choose the bucket for a call. Raises InputMismatchError, or BucketError with the bucket table."""
        if self.kernel is not None:
            return self._route_by_kernel(positional, named)
        candidates: list[tuple[int, Mapping[str, Tensor]]] = []
        problems = []
        for index in self._by_size:
            try:
                candidates.append((index, bind(self.buckets[index], positional, named)))
            except InputMismatchError as error:
                problems.append(error)
        if not candidates:
            raise InputMismatchError(f"{problems[0]}{self._table()}")
        for index, inputs in candidates:
            check_tensors(inputs)
            if all(fits(spec, inputs[spec.name]) for spec in self.buckets[index].inputs if spec.name in inputs):
                check_ranges(self.buckets[index].inputs, inputs)
                return Route(index, inputs)
        raise self._no_fit(candidates)

    def exact(self, index: int, inputs: Mapping[str, Tensor]) -> Route:
        """Route to bucket ``index``, with inputs of exactly its shapes. Raises InputMismatchError."""
        bucket = self.buckets[index]
        check_tensors(inputs)
        try:
            inputs = bind(bucket, [], inputs)
        except InputMismatchError as error:
            raise InputMismatchError(f"bucket {bucket.name!r}: {error}") from None
        for spec in bucket.inputs:
            tensor = inputs.get(spec.name)
            if tensor is None:
                continue
            if dtype_name(tensor.dtype) != spec.dtype:
                raise InputMismatchError(_dtype_text(spec, tensor, f" in bucket {bucket.name!r}"))
            if list(tensor.shape) != spec.shape:
                raise InputMismatchError(
                    f"input {spec.name!r} has shape {list(tensor.shape)}, bucket {bucket.name!r} takes {spec.shape}"
                )
        check_ranges(bucket.inputs, inputs)
        return Route(index, inputs)

    def _table(self) -> str:
        return f"\nThe buckets:\n{bucket_table(self.buckets)}"

    def _no_fit(self, candidates: Sequence[tuple[int, Mapping[str, Tensor]]]) -> InputMismatchError:
        """Return the error: a dtype that no bucket takes, else the shapes with the table."""
        for index, inputs in candidates:
            for spec in self.buckets[index].inputs:
                tensor = inputs.get(spec.name)
                every = (other for i, _ in candidates for other in self.buckets[i].inputs)
                taken = {other.dtype for other in every if other.name == spec.name}
                if tensor is not None and dtype_name(tensor.dtype) not in taken:
                    return InputMismatchError(_dtype_text(spec, tensor, ""))
        called = ", ".join(f"{name}: {dtype_name(t.dtype)}{list(t.shape)}" for name, t in candidates[0][1].items())
        shapes = [{spec.name: list(spec.shape) for spec in bucket.inputs} for bucket in self.buckets]
        return BucketError(
            f"no bucket fits {called}. The buckets (<= marks dimensions that are padded):\n"
            f"{bucket_table(self.buckets)}\n"
            "Trace a bucket of that shape. If rows are independent, trace with batch_dim=0, which pads smaller "
            "batches; other dimensions that may be padded are declared in nxd_inputs",
            shapes,
        )

    def _route_by_kernel(self, positional: Sequence[Any], named: Mapping[str, Any]) -> Route:
        assert self.kernel is not None
        inputs = bind(self.buckets[0], positional, named, complete=False)
        check_tensors(inputs)
        try:
            tensors, chosen = self.kernel(list(inputs.values()))
        except NxdError:
            raise  # the ranks that run the kernel failed
        except RuntimeError as error:
            raise BucketError(f"the bucket kernel raised: {error}{self._table()}") from error
        index = int(chosen)
        if not 0 <= index < len(self.buckets):
            raise BucketError(f"the bucket kernel chose bucket {index} of {len(self.buckets)}{self._table()}")
        try:
            return self.exact(index, bind(self.buckets[index], tensors, {}, complete=False))
        except InputRangeError:
            raise  # the caller's value is at fault, not the kernel
        except InputMismatchError as error:
            raise BucketError(f"the bucket kernel's result does not fit its bucket: {error}{self._table()}") from error


def bind(
    bucket: BucketSpec, positional: Sequence[Any], named: Mapping[str, Any], *, complete: bool = True
) -> dict[str, Tensor]:
    """Return arguments by input name. Raises InputMismatchError for those that the bucket does not take, and if
    they are to be ``complete`` for one that is missing and has no default.

    Tensors in lists and dictionaries are given as they were traced: that of ``past.0`` is the first of ``past``.
    """
    names = slots = [spec.name for spec in bucket.inputs]
    nested = any(isinstance(value, (Mapping, list, tuple)) for value in (*positional, *named.values()))
    if nested and any("." in name for name in names):
        slots = list(dict.fromkeys(name.partition(".")[0] for name in names))
    if len(positional) > len(slots):
        raise InputMismatchError(
            f"{len(positional)} inputs given, bucket {bucket.name!r} takes {len(names)}: {', '.join(names)}"
        )
    inputs: dict[str, Any] = dict(zip(slots, positional, strict=False))
    if twice := [name for name in named if name in inputs]:
        raise InputMismatchError(f"input {twice[0]!r} is given by position and by name")
    inputs.update(named)
    if slots is not names:
        inputs = dict(_leaves(inputs))
    if unknown := [name for name in inputs if name not in names]:
        raise InputMismatchError(f"there is no input {unknown[0]!r}; the inputs are {', '.join(names)}")
    missing = [spec.name for spec in bucket.inputs if spec.name not in inputs and spec.default is None]
    if complete and missing:
        raise InputMismatchError(f"input {missing[0]!r} is missing and has no default")
    return {name: inputs[name] for name in names if name in inputs}


def _leaves(values: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def check_tensors(inputs: Mapping[str, object]) -> None:
    """Check that every input is a dense tensor in the host's memory."""
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            raise InputMismatchError(f"input {name!r} is a {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise InputMismatchError(f"input {name!r} has layout {tensor.layout}, expected a dense (strided) tensor")
        if not on_host(tensor):
            raise InputMismatchError(f"input {name!r} is on {tensor.device}, expected cpu: call .cpu() on it")


def fits(spec: InputSpec, tensor: Tensor) -> bool:
    """Whether ``tensor`` has the traced shape, or is smaller only where a pad value is declared."""
    if dtype_name(tensor.dtype) != spec.dtype or tensor.dim() != len(spec.shape):
        return False
    return all(
        size == full or (size < full and dim in spec.pad)
        for dim, (size, full) in enumerate(zip(tensor.shape, spec.shape, strict=True))
    )


def elements(bucket: BucketSpec) -> int:
    """Return the number of input elements of the whole bucket."""
    return sum(math.prod(spec.shape) for spec in bucket.inputs)


def check_ranges(specs: Sequence[InputSpec], inputs: Mapping[str, Tensor]) -> None:
    """Raise InputRangeError for a value outside the range that the model declares for its input."""
    for spec in specs:
        tensor = inputs.get(spec.name)
        if (spec.minimum is None and spec.maximum is None) or tensor is None or tensor.numel() == 0:
            continue
        for value in map(Tensor.item, torch.aminmax(tensor)):  # 2 microseconds for a few hundred ids
            spec.check(value)


def lawful(spec: InputSpec) -> Tensor:
    """Return an allowed tensor of the input's shape: zeros, or the allowed value nearest to zero."""
    return torch.full(spec.shape, _scalar(spec, spec.nearest_to_zero()), dtype=spec.torch_dtype)


def lawful_inputs(bucket: BucketSpec) -> dict[str, Tensor]:
    """Return an allowed tensor for each input that has no default."""
    return {spec.name: lawful(spec) for spec in bucket.inputs if spec.default is None}


def fill(view: Tensor, spec: InputSpec, tensor: Tensor | None) -> None:
    """Write an input into ``view`` (of the bucket's shape): its values, its padding, or its default.

    If several dimensions are padded, the pad value of the last one fills the corner that they share.
    """
    if tensor is None:
        view.fill_(_scalar(spec, spec.default if spec.default is not None else 0))
        return
    tensor = tensor.detach()
    if tensor.shape == view.shape:
        view.copy_(tensor)
        return
    inside = view
    regions = []
    for dim, size in enumerate(tensor.shape):
        if size < view.shape[dim]:
            regions.append((view.narrow(dim, size, view.shape[dim] - size), spec.pad[dim]))
            inside = inside.narrow(dim, 0, size)
    for region, value in regions:
        region.fill_(_scalar(spec, value))
    inside.copy_(tensor)


def _scalar(spec: InputSpec, value: float) -> float | int | bool:
    """Convert a number of the manifest, which keeps floats, to an integer for integer tensors."""
    dtype = spec.torch_dtype
    if dtype == torch.bool:
        return bool(value)
    if not dtype.is_floating_point and not dtype.is_complex and math.isfinite(value):
        return int(value)
    return value


def cut(bucket: BucketSpec, inputs: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs cut to the size of the caller's inputs, where the manifest declares it. Views, no copies."""
    result = []
    for spec, output in zip(bucket.outputs, outputs, strict=True):
        for dim, (name, input_dim) in spec.cut.items():
            tensor = inputs.get(name)
            if tensor is not None and tensor.shape[input_dim] < output.shape[dim]:
                output = output.narrow(dim, 0, tensor.shape[input_dim])
        result.append(output)
    return result


def _dtype_text(spec: InputSpec, tensor: Tensor, where: str) -> str:
    return (
        f"input {spec.name!r} is {dtype_name(tensor.dtype)}{list(tensor.shape)}, "
        f"expected {spec.dtype}{shape_text(spec)}{where}: convert it with .to(torch.{spec.dtype})"
    )
