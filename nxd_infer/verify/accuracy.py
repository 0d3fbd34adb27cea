"""Measure the accuracy lost to rounded weights: the model with quantized weights against the model with its own.

Both run eagerly and unsharded. :mod:`.artifact` checks that the artifact equals the model with quantized weights, whose
layers round their inputs if the artifact's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nxd_infer.artifact.manifest import Manifest, WeightSpec
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.backends import registry as backends
from nxd_infer.backends.base import Quantization, quantization_of, quantizations_of
from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_infer.layout import TensorLayout, shard_tensor
from nxd_infer.layout.sources import WrappedSource
from nxd_infer.util.dtypes import dtype_of
from nxd_models import registry
from nxd_server.text.tokenizer import Tokenizer

TOKENS = 512
"""Maximum length of the text over which logits are compared."""
Outputs = dict[str, Tensor]


def quantization(manifest: Manifest) -> Quantization | None:
    """Return the form of the artifact's rounded weights, if it has any."""
    return quantization_of(manifest, backends.get(manifest.backend))


class RoundedSource(WrappedSource):
    """Logical weights as the ranks of an artifact use them: each rank quantizes its own shard."""

    def __init__(self, manifest: Manifest, source: Any):
        """``source``: the original weights (a WeightSource), under the names of the manifest's layout."""
        self._source = source
        forms = quantizations_of(manifest, backends.get(manifest.backend))
        self._parts: dict[str, list[tuple[TensorLayout, WeightSpec, Quantization]]] = {}
        for spec in manifest.weights:
            for rank in manifest.layout["weights"][spec.name]["ranks"] if spec.encoding in forms else ():
                layout = TensorLayout.from_json(rank)
                for name in layout.names:
                    self._parts.setdefault(name, []).append((layout, spec, forms[spec.encoding]))

    def read(self, name: str, slices: Any = None) -> Tensor:
        if name not in self._parts:
            return self._source.read(name, slices)
        whole = torch.empty(self._source.shape(name), dtype=self._parts[name][0][1].torch_dtype)
        for layout, spec, form in self._parts[name]:
            rounded = form.rounded(shard_tensor(self._source, layout, spec.torch_dtype))
            for block in layout.blocks():
                if block.name == name:
                    whole[block.logical_slices] = rounded[block.local_slices].to(spec.torch_dtype)
        return whole if slices is None else whole[slices]

    def load(self, model: nn.Module) -> tuple[nn.Module, list[RemovableHandle]]:
        """Load ``model`` with these weights, and let its layers round their inputs as the ranks do, each its part of K;
        until the handles are removed."""
        layers: dict[nn.Module, tuple[Callable[[Tensor], Tensor], int]] = {}
        for name, ((_, spec, form), *_) in self._parts.items():
            if form.inputs is not None:
                layers[model.get_submodule(name.rpartition(".")[0])] = form.inputs, spec.shape[-1]

        def rounding(inputs: Callable[[Tensor], Tensor], size: int) -> Callable[[nn.Module, Any], Any]:
            return lambda _, args: (inputs(args[0].unflatten(-1, (-1, size))).flatten(-2), *args[1:])

        handles = [layer.register_forward_pre_hook(rounding(*how)) for layer, how in layers.items()]
        return hf.load(model, self), handles


@dataclass(frozen=True)
class Accuracy:
    """How far the outputs of a model with rounded weights are from its own; of a generating model, its logits."""

    largest: float
    """max |rounded - own|"""
    mean: float
    scale: float
    """max |own|"""
    tokens: int = 0
    """Of a generating model: the length of the text."""
    same: int = 0
    """Tokens after which both find the same next one likeliest."""
    perplexity: tuple[float, float] | None = None
    """The model's own and that of the rounded weights; None over random tokens."""


@torch.no_grad()
def of_text(artifact: LoadedArtifact, model_dir: Path, weights: Any, text: str, seed: int) -> Accuracy:
    """Compare the logits with those of the original ``weights`` over ``text``, or over random tokens."""
    meta = artifact.manifest.metadata
    ids, of_text = _tokens(artifact, text, min(TOKENS, meta["max_len"]), meta["vocab_size"], seed)
    with torch.device("meta"):
        model = registry.build(model_dir, "generate", dtype_of(meta["dtype"]))
    hf.load(model, weights).eval()
    own = model(ids[None])[0].float()
    RoundedSource(artifact.manifest, hf.named_weights(model, weights)).load(model)
    rounded = model(ids[None])[0].float()
    difference = (rounded - own).abs()
    return Accuracy(
        largest=float(difference.max()),
        mean=float(difference.mean()),
        scale=float(own.abs().max()),
        tokens=len(ids),
        same=int((rounded.argmax(-1) == own.argmax(-1)).sum()),
        perplexity=(_perplexity(own, ids), _perplexity(rounded, ids)) if of_text else None,
    )


def _perplexity(logits: Tensor, ids: Tensor) -> float:
    return float(F.cross_entropy(logits[:-1], ids[1:]).exp())


def _tokens(artifact: LoadedArtifact, text: str, count: int, vocabulary: int, seed: int) -> tuple[Tensor, bool]:
    """Return ids [n], n at most ``count``, and whether they are the text's; random ids without a usable tokenizer."""
    try:
        ids = Tokenizer.from_dir(artifact).encode(text)[:count] if text else []
    except (ModelConfigError, ModuleNotFoundError):
        ids = []
    if len(ids) > 1 and max(ids) < vocabulary:
        return torch.tensor(ids), True
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)), False


@torch.no_grad()
def of_outputs(own: nn.Module, seen: Sequence[tuple[Outputs, Outputs]]) -> Accuracy:
    """Compare the artifact's outputs for the ``seen`` inputs with those of ``own``."""
    pairs = [(ours[name].double(), out.double()) for inputs, ours in seen for name, out in own(**inputs).items()]
    return Accuracy(
        largest=max(float((a - b).abs().max()) for a, b in pairs),
        mean=float(torch.cat([(a - b).abs().flatten() for a, b in pairs]).mean()),
        scale=max(float(b.abs().max()) for _, b in pairs),
    )
