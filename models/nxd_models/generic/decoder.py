"""A causal language model of transformers as our serving step takes it.

Shapes: B rows, S positions, E hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.errors import ModelConfigError
from nxd_models.generic import attention
from nxd_models.generic.build import adopt, parallel_model
from nxd_models.generic.config import GenericDecoderConfig
from nxd_models.serving.decoder_step import DecoderStep
from nxd_models.serving.kv_cache import LayerCache


@dataclass
class _Parts:
    """The model and two ways to run a part of it. They are no modules of ours: their modules are, under their names."""

    model: Any
    decoder: Any
    """Ids to final hidden states."""
    head: Any
    """The model around a decoder that returns the embeddings that it is given: what it does after the decoder."""


def parts_of(model: Any) -> _Parts:
    """Return how to run a model over a cache. Raises ModelConfigError if that cannot be right."""
    path = model.base_model_prefix
    for inner in ("language_model", "decoder"):
        if isinstance(getattr(model.get_submodule(path), inner, None), nn.Module):
            path += f".{inner}"
    parts = _Parts(model, model.get_submodule(path), _with(model, path, _Given()))
    _require_positions(parts.decoder)
    for module in model.modules():
        if type(module).__name__ == "GPTNeoSelfAttention":
            _attend_by_cache(module)
        if getattr(module, "rope_type", None) in ("dynamic", "longrope", "su"):
            module.rope_type = "default"  # its frequencies are those of short contexts, and config has their limit
    return parts


class CausalLM(nn.Module):
    """Built on the meta device it has no weights, otherwise newly initialized ones. Names are transformers'."""

    def __init__(self, config: GenericDecoderConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        model = parallel_model("AutoModelForCausalLM", config.raw, dtype, cached=True)
        adopt(self, model)
        self.parts = parts_of(model)

    def hidden_states(self, ids_BS: Tensor, positions_BS: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """Map ids at these positions of the cached sequences to final hidden states [B, S, E]."""
        with attention.over(caches, positions_BS, self.config.model_type):
            return self.parts.decoder(
                input_ids=ids_BS,
                attention_mask=torch.ones_like(ids_BS),
                position_ids=positions_BS.clamp(max=self.config.max_position - 1),
                use_cache=False,
            )[0]

    def logits(self, hidden_BSE: Tensor) -> Tensor:
        """Map final hidden states to logits [B, S, V], complete on every rank."""
        return self.parts.head(inputs_embeds=hidden_BSE, use_cache=False, return_dict=True).logits

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits [B, S, V], without a cache."""
        self.config.check_length(input_ids.shape[1])
        return self.parts.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True
        ).logits


class CausalLMStep(DecoderStep, CausalLM):
    """One generation step of a model of transformers."""

    nxd_equal_ranks = True


def _require_positions(decoder: nn.Module) -> None:
    """Raise ModelConfigError unless a token's result depends on its position, and on keys and values, only."""
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise ModelConfigError(f"{type(decoder).__name__} takes no position_ids (as with ALiBi)")
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Conv1d):
            raise ModelConfigError(f"{name} has a state of its own beside keys and values")
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise ModelConfigError(f"{name} counts positions by the ids")


class _Given(nn.Module):
    """In the place of a decoder: its result is the embeddings that it is given."""

    def forward(self, input_ids: None = None, inputs_embeds: Tensor | None = None, **_: Any) -> Any:
        return _Output(inputs_embeds)


class _Output:
    """What a decoder returns: the hidden states, and None for all else that a head may read."""

    def __init__(self, hidden: Any):
        self.last_hidden_state = hidden

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def _with(module: nn.Module, path: str, new: nn.Module) -> nn.Module:
    """Return ``module`` with ``new`` at ``path``. Every other module in it is the same object."""
    name, _, rest = path.partition(".")
    made = copy.copy(module)
    made._modules = {**module._modules, name: _with(module.get_submodule(name), rest, new) if rest else new}
    return made


def _attend_by_cache(module: Any) -> None:
    """Have a GPT-Neo attention, which has its own code instead of the interface, attend over the cache of a step."""
    config = module.config
    window = config.window_size if config.attention_layers[module.layer_id] == "local" else None
    own = module._attn

    def attend(query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        step = attention.current()
        if step is None:
            return own(query, key, value, *masks)
        seen = None
        if window is not None and isinstance(step, attention.Step) and window < step.max_len:
            seen = attention.visible(step, lambda row, head, at, past: past > at - window)
        return attention.attend(step, module.layer_id, query, key, value, seen, scale=1.0).transpose(1, 2), None

    module._attn = attend
