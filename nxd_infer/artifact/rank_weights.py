"""A rank's weight file, which is memory-mapped; it also holds initial values of states."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import TensorSpec, WeightSpec
from nxd_infer.errors import ArtifactCorruptError
from nxd_infer.layout.files.stream import write_safetensors

STATE_PREFIX = "state:"
"""Prefix in a rank's weight file for the initial value of a state that does not start as zeros."""


def load_weights(file: Path, specs: Sequence[TensorSpec], *, partial: bool = False) -> dict[str, Tensor]:
    """Return the weights of one rank, memory-mapped (copy on write): pages are read when a graph touches them.

    A weight whose traced stride is not contiguous is copied into that stride, because graphs are compiled for it.
    With ``partial`` some may be absent.
    """
    weights = _load(file, {spec.name: spec for spec in specs}, partial)
    for spec in specs:
        tensor = weights.get(spec.name)
        if tensor is not None and list(tensor.stride()) != spec.stride and tensor.numel() > 0:
            weights[spec.name] = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype).copy_(tensor)
    return weights


def load_entries(file: Path, specs: Sequence[WeightSpec]) -> dict[tuple[str, int], Tensor]:
    """Return the entries of adapter tables in a file of new weights, memory-mapped, by table and slot."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as source:
        matches = [match for name in list(source.keys()) if (match := _ENTRY.fullmatch(name))]
    entries = {match[0]: (match[1], int(match[2])) for match in matches}
    inner = {spec.name: spec.model_copy(update={"shape": spec.shape[1:]}) for spec in specs}
    loaded = _load(file, {name: inner[table] for name, (table, _) in entries.items() if table in inner}, False)
    return {entries[name]: tensor for name, tensor in loaded.items()}


def load_initial_states(file: Path, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Return the states that do not start as zeros, by name."""
    loaded = _load(file, {STATE_PREFIX + spec.name: spec for spec in specs}, True)
    return {name.removeprefix(STATE_PREFIX): tensor for name, tensor in loaded.items()}


def _load(file: Path, specs: Mapping[str, TensorSpec], partial: bool) -> dict[str, Tensor]:
    """Return the tensors by their names in the file, as it has them. Raises ArtifactCorruptError for another dtype or
    shape than the spec's."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as source:
            present = set(source.keys())
            for name, spec in specs.items():
                if partial and name not in present:
                    continue
                tensors[name] = tensor = source.get_tensor(name)
                if tensor.dtype != spec.torch_dtype or list(tensor.shape) != spec.shape:
                    actual = f"{tensor.dtype}{list(tensor.shape)}"
                    raise ArtifactCorruptError(f"{file.name}: {name!r} is {actual}, expected {spec.dtype}{spec.shape}")
    except SafetensorError as error:
        raise ArtifactCorruptError(f"{file.name} cannot be read as safetensors: {error}") from error
    return tensors


_ENTRY = re.compile(r"(.+)\[(\d+)\]")
"""What :func:`entry_name` returns."""


def entry_name(table: str, slot: int) -> str:
    """Return the name of the entry ``table[slot]`` of an adapter table in a rank's file of new weights."""
    return f"{table}[{slot}]"


def file_entries(specs: Iterable[TensorSpec]) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return the name, dtype and shape of each of ``specs``, for :func:`write_safetensors`."""
    return [(spec.name, spec.torch_dtype, spec.shape) for spec in specs]


def replace_weights(
    source: Path,
    target: Path,
    tensors: Mapping[str, Tensor],
    stored: Iterable[TensorSpec] = (),
    encode: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Copy a rank's weight file with ``tensors``, in place of those of the same names if there are such.

    Those that the file holds as one of ``stored`` go through ``encode(name, tensor)``, one at a time.
    """
    from safetensors import safe_open

    packed = {} if encode is None else {spec.name: spec for spec in stored if spec.name in tensors}
    with safe_open(source, framework="pt") as file, open(target, "wb") as out:

        def plain(name: str) -> Tensor:
            return tensors[name] if name in tensors else file.get_tensor(name)

        def tensor(name: str) -> Tensor:
            return encode(name, plain(name)) if encode is not None and name in packed else plain(name)

        names = sorted({*file.keys(), *tensors} - packed.keys())
        entries = [(name, one.dtype, one.shape) for name in names for one in [plain(name)]]
        write_safetensors(out, [*entries, *file_entries(packed.values())], tensor)
