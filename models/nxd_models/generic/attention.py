"""Our cache behind transformers' attention interface: an attention function and a mask function, both named ``nxd``.

transformers calls them for every model whose configuration asks for this implementation. The caches of the running step
are in a context variable, because models do not hand on arguments that they do not know. Outside of a step, attention
is that of PyTorch over the positions of the call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.errors import ModelConfigError
from nxd_infer.ops import cache_attention, masked_cache_attention
from nxd_models.generic.config import library
from nxd_models.serving.kv_cache import LayerCache

NAME = "nxd"
_OUTSIDE = "sdpa"
_WITHOUT_EFFECT = ("is_causal", "position_ids", "sliding_window", "use_cache", "cache_position")
"""Arguments for other implementations, or of models that hand on all of theirs: the mask has what they say."""


class Step:
    """The caches of one step, and what has been used of them."""

    def __init__(self, caches: Sequence[LayerCache], positions_BS: Tensor):
        self.caches = caches
        self.positions = positions_BS
        self.used: list[int] = []

    @property
    def max_len(self) -> int:
        return self.caches[0].keys.shape[2]


class Call(NamedTuple):
    """One use of the interface by a model that is probed."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int


_step: ContextVar[Step | list[Call] | None] = ContextVar("nxd_step", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """Yield a list of the calls that a model makes inside, each answered by zeros."""
    calls: list[Call] = []
    token = _step.set(calls)
    try:
        yield calls
    finally:
        _step.reset(token)


@contextlib.contextmanager
def over(caches: Sequence[LayerCache], positions_BS: Tensor, model_type: str) -> Iterator[None]:
    """Attend over ``caches`` inside.

    Raises ModelConfigError if the model does not attend exactly once in each layer by the interface, in which case its
    own code would have attended to this step's positions only.
    """
    step = Step(caches, positions_BS)
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)
    if sorted(step.used) != list(range(len(caches))):
        wrong = [layer for layer in range(len(caches)) if step.used.count(layer) != 1]
        raise ModelConfigError(
            f"{model_type}: its layers {wrong} of {len(caches)} do not attend by transformers' attention interface, so "
            "it cannot be served without a family of ours"
        )


@functools.cache
def register() -> None:
    """Make both functions known to transformers, by its own registries."""
    hf = library()
    hf.AttentionInterface.register(NAME, _attend)
    hf.AttentionMaskInterface.register(NAME, _mask)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[B, H, S, D] each -> [B, S, H, D]. Raises ModelConfigError naming an argument that has no equivalent here."""
    step = _step.get()
    scale = _scale(module, query.shape[-1]) if scaling is None else float(scaling)
    if step is None:
        others |= {"scaling": scale, "dropout": dropout, "softcap": softcap}
        if softcap is not None:
            raise ModelConfigError(f"{type(module).__name__}: soft-capped attention needs a cache here")
        return library().AttentionInterface()[_OUTSIDE](module, query, key, value, attention_mask, **others)
    given = {name for name, value in others.items() if value is not None and value is not False}
    unknown = sorted(given.difference(_WITHOUT_EFFECT))
    if unknown:
        raise ModelConfigError(f"{type(module).__name__}: attention with {', '.join(unknown)} cannot be served")
    return attend(step, module.layer_idx, query, key, value, attention_mask, scale, softcap), None


def _scale(module: Any, head_dim: int) -> float:
    """Return the factor of the scores for a module that leaves it to the function, as GPT-2 of transformers 4 does."""
    scale = 1.0 if getattr(module, "scale_attn_weights", True) is False else head_dim**-0.5
    return scale / (module.layer_idx + 1) if getattr(module, "scale_attn_by_inverse_layer_idx", False) else scale


def attend(
    step: Step | list[Call],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attend from [B, H, S, D] over the cache of ``layer``; returns [B, S, H, D], the values' D."""
    if isinstance(step, list):
        if visible is not None:
            raise ModelConfigError(f"layer {layer}: the model makes a mask of its own")
        sizes = query.shape[-1], key.shape[-1], value.shape[-1]
        step.append(Call(layer, query.shape[1], key.shape[1], max(sizes)))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    step.used.append(layer)
    cache = step.caches[layer]
    heads, size = cache.keys.shape[1], cache.head_dim
    for what, x in (("keys", key), ("values", value)):
        if heads % x.shape[1] or x.shape[3] > size:
            raise ModelConfigError(
                f"layer {layer}: {what} of (heads, size) = {(x.shape[1], x.shape[3])}, expected {(heads, size)}"
            )
    q, k, v = _fit(query, query.shape[1], size), _fit(key, heads, size), _fit(value, heads, size)
    if visible is not None and (visible.dtype != torch.bool or visible.shape[-1] != step.max_len):
        raise ModelConfigError(
            f"layer {layer}: the model makes a mask of its own, of {visible.dtype} {list(visible.shape)}, instead of "
            f"asking transformers' mask interface: it cannot be served with transformers {library().__version__}"
        )
    if visible is None and softcap is None:
        found = cache_attention(q, k, v, *cache, scale)
    else:
        found = masked_cache_attention(q, k, v, *cache, scale, None if visible is None else visible[:, 0], softcap)
    return found[..., : value.shape[-1]].contiguous()  # as transformers' own functions, whose callers take views


def _fit(x_BHSD: Tensor, heads: int, size: int) -> Tensor:
    """Return [B, S, heads, size]: heads repeated, and zeros after each, which change no score."""
    return F.pad(x_BHSD.repeat_interleave(heads // x_BHSD.shape[1], 1).transpose(1, 2), (0, size - x_BHSD.shape[-1]))


def current() -> Step | list[Call] | None:
    return _step.get()


def visible(step: Step, allowed: Callable[..., Tensor]) -> Tensor:
    """Return the mask [B, 1, S, T] of a mask function of transformers, for the positions of this step."""
    device = step.positions.device
    row = torch.arange(step.positions.shape[0], device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    past = torch.arange(step.max_len, device=device)[None, None, None]
    mask = allowed(row, head, step.positions[:, None, :, None], past)
    return mask.expand(step.positions.shape[0], 1, step.positions.shape[1], step.max_len)


def _mask(
    *args: Any,
    mask_function: Callable[..., Tensor],
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    **others: Any,
) -> Tensor | None:
    """Return what a query sees of the positions up to its own; None: all of them."""
    step = _step.get()
    if step is None:
        skip = {"allow_is_causal_skip": allow_is_causal_skip, "local_size": local_size}
        return library().AttentionMaskInterface()[_OUTSIDE](*args, mask_function=mask_function, **skip, **others)
    if not allow_is_causal_skip:  # a mask that the model has made more of than causal, or a window
        raise ModelConfigError("a mask that depends on more than positions cannot be served")
    if isinstance(step, list) or local_size is None or local_size >= step.max_len:
        return None
    return visible(step, mask_function)
