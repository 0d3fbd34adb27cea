"""New weights for a traced model: logical tensors sharded for each rank using the manifest's layout.

``manifest.layout`` is ``{"weights": {name: {"logical": {logical name: shape}, "ranks": [tensor layout, ...]}}}``: how
each rank's tensor is assembled from logical tensors (``nxd_infer.layout``). Unlisted weights (constants, buffers that
no checkpoint holds) stay as they are. ``manifest.layout["adapters"]`` describes adapter tables likewise, and
``manifest.layout["unread"]`` lists logical tensors of the model that its graphs do not read.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import INLINE_WEIGHTS_REQUIREMENT, Manifest, weight_schema_hash
from nxd_infer.artifact.rank_weights import file_entries, load_weights
from nxd_infer.artifact.writer import is_disk_full
from nxd_infer.checkpoint.source import Weights, weight_source
from nxd_infer.errors import ArtifactError, ArtifactSpaceError, WeightSchemaError
from nxd_infer.layout import TensorLayout, shard_tensor
from nxd_infer.layout.files.stream import write_safetensors


class WeightUpdate:
    """Checked new weights, sharded for one rank at a time."""

    def __init__(self, manifest: Manifest, weights: Weights, *, strict: bool = True, tag: str | None = None):
        """``strict`` requires every logical tensor of the layout and no others; without it any subset is accepted.
        The model's states and the weights that no graph reads are ignored.

        Raises WeightSchemaError listing what is missing, unexpected, or has another shape or kind of dtype.
        """
        if INLINE_WEIGHTS_REQUIREMENT in manifest.requires:
            raise WeightSchemaError(
                "the weights are part of this artifact's compiled graphs (inline_weights_to_neff=True) and cannot be "
                "updated: trace with inline_weights_to_neff=False"
            )
        if weight_schema_hash(manifest.weights) != manifest.weight_schema:
            raise WeightSchemaError("the artifact's weight schema does not match its own hash; trace again")
        self.manifest = manifest
        self._specs = {spec.name: spec for spec in manifest.weights}
        self._layout: dict[str, dict[str, Any]] = manifest.layout.get("weights", {})
        self.entries = {name: entry for name, entry in self._layout.items() if name in self._specs}
        if not self.entries:
            raise WeightSchemaError("the artifact does not say how its weights are made (no layout); trace again")
        self.source = weight_source(weights, tag)
        self.names = self._check(strict)

    def _check(self, strict: bool) -> list[str]:
        """Return the names of the weights to change."""
        present = set(self.source.keys())
        missing, problems, names = [], [], []
        known = {key for entry in self._layout.values() for key in entry["logical"]}
        # A state dict includes them; the ranks keep their states.
        known |= {*self.manifest.layout.get("unread", ()), *(state.name for state in self.manifest.states)}
        for name in self.entries:
            logical = self._readable(name, present)["logical"]
            absent = [key for key in logical if key not in present]
            if absent:
                missing += absent if strict or len(absent) < len(logical) else []
                continue
            names.append(name)
            for key, shape in logical.items():
                if list(self.source.shape(key)) != list(shape):
                    problems.append(f"{key} has shape {list(self.source.shape(key))}, traced with {list(shape)}")
                if self.source.dtype(key).is_floating_point != self._specs[name].torch_dtype.is_floating_point:
                    problems.append(f"{key} is {self.source.dtype(key)}, traced as {self._specs[name].dtype}")
        unexpected = sorted(present - known)
        texts = [f"missing: {_listed(sorted(set(missing)))}"] if missing else []
        texts += [f"different: {_listed(sorted(set(problems)), '; ')}"] if problems else []
        texts += [f"unexpected: {_listed(unexpected)}"] if unexpected and (strict or not names) else []
        if texts or not names:
            raise WeightSchemaError(
                "the weights do not fit this artifact and nothing was changed. " + ". ".join(texts or ["none given"])
            )
        return names

    def _readable(self, name: str, present: set[str]) -> dict[str, Any]:
        """Return the layout for reading weight ``name``: that of a tied name if only that one is stored."""
        entry = self.entries[name]
        first = entry.get("alias_of") or name
        ties = [e for other, e in self._layout.items() if first in (other, e.get("alias_of"))]
        return next((e for e in [entry, *ties] if set(e["logical"]) <= present), entry)

    def write(self, rank: int) -> BinaryIO:
        """Write the rank's new weights to an anonymous safetensors file, which is deleted with its last user."""
        own = {spec.name for spec in self.manifest.of_rank(rank).weights}
        specs = [self._specs[name] for name in self.names if name in own]
        present = set(self.source.keys())

        def tensor(name: str) -> Tensor:
            try:
                layout = TensorLayout.from_json(self._readable(name, present)["ranks"][rank % self.manifest.tp_degree])
                return shard_tensor(self.source, layout, self._specs[name].torch_dtype)
            except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
                raise WeightSchemaError(f"{name} cannot be cut for rank {rank}: {error}") from error

        return anonymous_file(file_entries(specs), tensor)


def anonymous_file(
    entries: Iterable[tuple[str, torch.dtype, Sequence[int]]], tensor: Callable[[str], Tensor]
) -> BinaryIO:
    """Write ``tensor(name)`` for each ``(name, dtype, shape)`` to an unnamed safetensors file; the caller closes it.

    Raises ArtifactSpaceError if there is no space for it, ArtifactError if it cannot be written at all.
    """
    try:
        file = tempfile.TemporaryFile(prefix="nxd-weights-")  # noqa: SIM115
        try:
            write_safetensors(file, entries, tensor)
        except BaseException:
            with contextlib.suppress(OSError):  # flushing its buffer fails again
                file.close()
            raise
    except OSError as error:
        kind = ArtifactSpaceError if is_disk_full(error) else ArtifactError
        raise kind(
            f"the new weights cannot be written to {tempfile.tempdir or 'a temporary file'}, and nothing was changed: "
            f"{error}; free space there, or set TMPDIR to another directory"
        ) from error
    return file


class Update(Protocol):
    """A checked update that can be sharded for a rank: a WeightUpdate, or an adapter."""

    manifest: Manifest
    names: list[str]

    def write(self, rank: int) -> BinaryIO: ...


class NewWeights:
    """Weights that were checked and sharded for every rank of one artifact, in anonymous files, ready to swap in."""

    def __init__(self, update: Update):
        self.manifest = update.manifest
        self.names = frozenset(update.names)
        self.files: list[BinaryIO] = []
        """One per rank."""
        try:
            for rank in range(update.manifest.world_size):
                self.files.append(update.write(rank))
        except BaseException:
            self.close()
            raise

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """Return what was cut for ``rank``, memory-mapped, by name."""
        file = Path(f"/proc/self/fd/{self.files[rank].fileno()}")
        return load_weights(file, self.manifest.weights, partial=True)

    def close(self) -> None:
        """Release the files; ranks that have mapped theirs keep them."""
        for file in self.files:
            file.close()


def _listed(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join(names[:12]) + (f", ... ({len(names)} in total)" if len(names) > 12 else "")
