"""One generation step of an encoder-decoder model: the same inputs, outputs and sampler as a decoder's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_infer.context import current_context
from nxd_infer.errors import ModelConfigError
from nxd_models.serving.decoder_step import DecoderStep
from nxd_models.serving.kv_cache import LayerCache, StateList


class Seq2SeqStep(DecoderStep):
    """Mixin for an encoder-decoder model, which it runs as if it were a decoder that continues prompts.

        class T5Step(Seq2SeqStep, ConditionalGeneration): ...

    A step of many tokens per row *reads prompts*: the encoder runs over each whole prompt, what the decoder attends to
    in it becomes the slot's ``prompt_k`` and ``prompt_v``, and the decoder's first token is the answer's. A step of one
    token per row, or of ``draft_tokens + 1``, feeds the decoder. Its positions count from the answer's begin, where
    those of the step's inputs count from the prompt's: the prompt's last token stands for ``config.decoder_start``, so
    that penalties count the answer only, as in transformers.

    The model has ``encode(ids [B, S], length [B])``, which returns states [B, S, E]; ``keys_values(states)``, one pair
    [B, S, H, D] per layer of the decoder; ``decode(ids, positions, caches, prompts)``, like ``hidden_states`` of a
    decoder, with a :class:`LayerCache` of the prompt per layer, whose ``start`` is its last position; and ``logits``.
    Key and value heads are as many, and placed alike, in both caches.
    """

    # Provided by the model.
    config: Any  # a DecoderConfig with decoder_start, the id of the token before every answer
    encode: Callable[[Tensor, Tensor], Tensor]
    keys_values: Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]]
    decode: Callable[[Tensor, Tensor, Sequence[LayerCache], Sequence[LayerCache]], Tensor]

    shortest_prompt = 2
    prompt_size: Tensor

    def __init__(self, config: Any, dtype: torch.dtype = torch.float32, **options: Any):
        super().__init__(config, dtype, **options)
        if current_context().pp.degree > 1:
            raise ModelConfigError(
                f"{config.model_type}: a model with an encoder has no pipeline stages; trace it with pp_degree = 1 and "
                "a higher tensor-parallel degree"
            )
        self.prompt_k = StateList(config.num_layers, self.cache_shape, dtype)
        self.prompt_v = StateList(config.num_layers, self.cache_shape, dtype)
        self.register_buffer("prompt_size", torch.zeros(self.slots + 1, dtype=torch.int64), persistent=False)

    @property
    def nxd_states(self) -> list[str]:
        layers = range(self.config.num_layers)
        return [*super().nxd_states, *(f"prompt_{kind}.{i}" for i in layers for kind in "kv"), "prompt_size"]

    def fed(
        self, tokens: Tensor, start: Tensor, length: Tensor, block_table: Tensor, prompt_length: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slot_B, S = torch.where(length > 0, block_table[:, 0], self.slots), tokens.shape[1]
        if S not in (1, self.draft_tokens + 1):
            self._read(tokens, length, slot_B)
            begin = torch.full_like(tokens[:, :1], self.config.decoder_start)
            return begin, torch.zeros_like(start), length.clamp(max=1), prompt_length - length + 1
        earlier = self.prompt_size.index_select(0, slot_B) - 1
        return tokens, (start - earlier).clamp(min=0), length, prompt_length - earlier

    def _read(self, tokens_BS: Tensor, length_B: Tensor, slot_B: Tensor) -> None:
        states = self.encode(tokens_BS.clamp(0, self.config.vocab_size - 1), length_B)
        at_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        where = [slot_B[:, None], None, at_S[None]]
        for i, (keys, values) in enumerate(self.keys_values(states)):
            torch.ops.aten.index_put_(self.prompt_k[i], where, keys)
            torch.ops.aten.index_put_(self.prompt_v[i], where, values)
        torch.ops.aten.index_put_(self.prompt_size, [slot_B], length_B)

    def hidden_states(self, ids_BS: Tensor, positions_BS: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """Map ids at these positions of the answers to final hidden states [B, S, E]."""
        table = caches[0].block_table
        last_B = (self.prompt_size.index_select(0, table[:, 0]) - 1).clamp(min=0)
        one_B = torch.ones_like(last_B)
        prompts = [
            LayerCache(self.prompt_k[i], self.prompt_v[i], table, last_B, one_B) for i in range(self.config.num_layers)
        ]
        return self.decode(ids_BS, positions_BS, caches, prompts)
