"""Read Hugging Face weights under our logical names: names are resolved, no file is changed, nothing is unpickled.

Checkpoints of one architecture differ in their prefix (``model.layers.0...`` or ``layers.0...``; ``bert.encoder...`` or
``encoder...``), in old names (``LayerNorm.gamma``), and in additional tensors (``position_ids``, ``inv_freq``, heads of
other tasks). :class:`HuggingFaceSource` resolves the names that a model asks for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.hugging_face.gguf_file import model_directory
from nxd_infer.hugging_face.quantized.formats import format_in
from nxd_infer.hugging_face.quantized.source import DequantizedSource, check_plain
from nxd_infer.hugging_face.stored import StackedWeight, StoredWeight, stored_as
from nxd_infer.hugging_face.tied_head import EMBEDDINGS, check_tied_head
from nxd_infer.layout import restore_attributes, weight_layout
from nxd_infer.layout.shard import check_weights, iter_shards
from nxd_infer.layout.sources import SafetensorsSource, Slices, Weights, WeightSource, as_source

PREFIXES = ("model.", "bert.", "roberta.", "transformer.", "0.auto_model.")
"""Prefixes that a checkpoint may have and a model not, or vice versa."""

WHOLE = StoredWeight("")
"""An unchanged tensor of the checkpoint."""
_OLD_NAMES = {".weight": ".gamma", ".bias": ".beta"}

CONVERSION_HINT = (
    "pickled weights are never loaded, because reading them runs code; convert them once, where you trust them, with "
    "transformers: AutoModel.from_pretrained(DIR).save_pretrained(DIR, safe_serialization=True)"
)


class HuggingFaceSource:
    """A weight source with our models' names, over a checkpoint whose names may differ as described above.

    ``keys()`` returns the checkpoint's own names; any spelling that resolves can be read.
    """

    def __init__(self, source: WeightSource, prefixes: Iterable[str] = PREFIXES, tied_head: str | None = None):
        """``tied_head``: the tensor that also is the embedding, which the checkpoint does not hold by its own name."""
        self._source = source
        self._tied_head = tied_head
        self._prefixes = tuple(prefixes)
        self._names = frozenset(source.keys())
        self._resolved: dict[str, str] = {}

    def with_prefix(self, prefix: str) -> HuggingFaceSource:
        """Return the same weights, whose names may also have ``prefix``."""
        return HuggingFaceSource(self._source, dict.fromkeys((*self._prefixes, prefix)), self._tied_head)

    def keys(self) -> Iterable[str]:
        return self._names

    def resolve(self, name: str) -> str | None:
        """Return the checkpoint's name of our ``name``, or None if it has no such tensor."""
        found = self._resolved.get(name)
        if found is None:
            found = next((c for c in _spellings(name, self._prefixes) if c in self._names), None)
            if found is None and name.endswith(EMBEDDINGS):
                found = self._tied_head
            if found is not None:
                self._resolved[name] = found
        return found

    def _find(self, name: str) -> str:
        # Pass an unknown name on to the source, whose error lists the names that exist.
        return self.resolve(name) or name

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._find(name))

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._find(name))

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._source.read(self._find(name), slices)

    def view(self, names: Iterable[str], stored: Mapping[str, StoredWeight] | None = None) -> NamedSource:
        """Return the same weights with exactly ``names`` as keys; names that do not resolve are omitted.

        ``stored``: weights that the checkpoint may store differently.
        """
        found = {}
        for name in names:
            if (own := self.resolve(name)) is not None:
                found[name] = (own, WHOLE)
            elif (other := stored_as(name, stored or {})) is not None and self.resolve(other[0]) is not None:
                found[name] = other
        return NamedSource(self, found)


class NamedSource:
    """The part of a checkpoint that a model reads, under the model's names."""

    def __init__(self, source: HuggingFaceSource, table: Mapping[str, tuple[str, StoredWeight]]):
        self._source = source
        self._table = dict(table)

    def keys(self) -> Iterable[str]:
        return self._table.keys()

    def _find(self, name: str) -> tuple[str, StoredWeight]:
        return self._table.get(name, (name, WHOLE))

    def shape(self, name: str) -> tuple[int, ...]:
        there, stored = self._find(name)
        return stored.shape(self._source, there)

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._find(name)[0])

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        there, stored = self._find(name)
        return stored.read(self._source, there, slices)


class StoredSource:
    """The weights of a ``source`` of ours, under the names and in the form in which checkpoints hold them.

    Raises WeightMismatchError if only some parts of a checkpoint's tensor are there.
    """

    def __init__(self, source: WeightSource, table: Mapping[str, StoredWeight]):
        self._source = source
        self._parts: dict[str, dict[int, str]] = {}
        self._stored: dict[str, StoredWeight] = {}
        self._stacked: dict[str, tuple[str, tuple[slice, slice]]] = {}
        for name in source.keys():  # noqa: SIM118  (a source is not a mapping)
            there, stored = stored_as(name, table) or (name, WHOLE)
            if isinstance(stored, StackedWeight):
                pieces = stored.pieces(there, source.shape(name))
                self._stacked |= {one: (name, place) for one, place in pieces.items()}
                continue
            if stored.fallback:
                there, stored = name, WHOLE
            self._parts.setdefault(there, {})[stored.part] = name
            self._stored[there] = stored
        for there, stored in self._stored.items():
            if len(self._parts[there]) != stored.parts:
                raise WeightMismatchError(
                    f"{there} is made of {stored.parts} weights, and there are only "
                    f"{', '.join(self._parts[there].values())}"
                )

    def keys(self) -> Iterable[str]:
        return [*self._parts, *self._stacked]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._stacked:
            own, (_, rows) = self._stacked[name]
            return (rows.stop - rows.start, *self._source.shape(own)[2:])
        shapes = [self._source.shape(part) for part in self._parts[name].values()]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
        return whole[::-1] if self._stored[name].transposed else whole

    def dtype(self, name: str) -> torch.dtype:
        own = self._stacked[name][0] if name in self._stacked else next(iter(self._parts[name].values()))
        return self._source.dtype(own)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        if name in self._stacked:
            own, place = self._stacked[name]
            found = self._source.read(own, [*place, slice(None)])[0]
            return found if slices is None else found[tuple(slices)]
        parts = [self._source.read(part) for _, part in sorted(self._parts[name].items())]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        found = whole.T.contiguous() if self._stored[name].transposed else whole
        return found if slices is None else found[tuple(slices)]


def _spellings(name: str, prefixes: Sequence[str]) -> Iterable[str]:
    bare = name
    for prefix in prefixes:
        bare = bare.removeprefix(prefix)
    plain = [name, *dict.fromkeys((bare, *(prefix + known for known in (bare, name) for prefix in prefixes)))]
    yield from plain
    if "norm" in name.lower():
        for new, old in _OLD_NAMES.items():
            if name.endswith(new):
                yield from (n.removesuffix(new) + old for n in plain)


def stored_weights(path: str | os.PathLike[str]) -> WeightSource:
    """Open safetensors, a file or a directory; weights that the ``config.json`` beside them calls quantised are read
    dequantised. Raises CheckpointError naming the file, or a weight quantised otherwise; ModelConfigError for a form
    that is not read."""
    path = Path(path)
    source, form = SafetensorsSource(path), format_in(path if path.is_dir() else path.parent)
    if form is None:
        check_plain(source, source.keys())
    return source if form is None else DequantizedSource(source, form)


def weights(
    model_dir: str | os.PathLike[str], prefixes: Sequence[str] = PREFIXES, *, ties: bool = True
) -> HuggingFaceSource:
    """Open the weights of a model directory (one file, or several with or without an index), to be read by slices.

    ``prefixes``: what the names of a checkpoint may begin with and a model's not, or vice versa. ``ties``: whether
    ``config.json`` may tie its output head to its embedding.
    Quantised ones are read dequantised.
    Raises CheckpointError naming the file if there are none, if one is damaged, or if there are only pickles;
    WeightMismatchError for a head that is to be tied and is not the embedding.
    """
    path = model_directory(model_dir)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
        if pickles:
            raise CheckpointError(f"{path} holds {', '.join(pickles)} and no safetensors file: {CONVERSION_HINT}")
    source = stored_weights(path)
    return HuggingFaceSource(source, prefixes, check_tied_head(path, source) if ties else None)


def named_weights(module: nn.Module, source: Weights) -> NamedSource:
    """Return the logical weights that ``module`` reads, under its names, all checked for presence and shape.

    The attribute ``nxd_stored``, set by :mod:`nxd_models.registry`, says what checkpoints store differently;
    ``nxd_prefix``, if there is one, is one more prefix that their names may have.

    Other tensors of the checkpoint (heads of other tasks, constants) are ignored. Raises WeightMismatchError listing
    missing weights and different shapes.
    """
    found = source if isinstance(source, HuggingFaceSource) else HuggingFaceSource(as_source(source))
    if (prefix := getattr(module, "nxd_prefix", None)) is not None:
        found = found.with_prefix(f"{prefix}.")
    layouts = weight_layout(module)
    names = [logical for layout in layouts.values() for logical in layout.logical_names]
    named = found.view(names, getattr(module, "nxd_stored", None))
    check_weights(layouts, named)
    return named


def load(module: nn.Module, source: Weights) -> nn.Module:
    """Load this rank's shard of the weights into ``module``, one tensor at a time; returns the module.

    Parameters on the meta device are replaced by real ones, so a model built under ``torch.device("meta")`` never
    holds more than its own shard. dtypes are those of the module.
    """
    here = current_context().tp
    named = named_weights(module, source)
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict(keep_vars=True).items()}
    layouts = weight_layout(module)
    with torch.no_grad():
        for name, tensor in iter_shards(layouts, named, here.rank, here.degree, dtypes):
            path, _, attribute = name.rpartition(".")
            owner = module.get_submodule(path)
            old = getattr(owner, attribute)
            if old.shape != tensor.shape:
                raise WeightMismatchError(
                    f"{name} has the shape {tuple(old.shape)}, but {tuple(tensor.shape)} at degree {here.degree}: "
                    "build the model in the context that it is loaded in",
                    mismatched=((name, tuple(old.shape), tuple(tensor.shape)),),
                )
            if not old.is_meta:
                old.copy_(tensor)
            elif isinstance(old, nn.Parameter):
                tied = layouts[name].alias_of
                new = module.get_parameter(tied) if tied else nn.Parameter(tensor, old.requires_grad)
                setattr(owner, attribute, new)
            else:
                setattr(owner, attribute, tensor)
    restore_attributes(module)
    return module
