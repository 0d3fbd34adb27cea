"""One generation step, including its cache and its sampler: the module that is traced.

The same step serves decode (S = 1), prefill, chunked prefill and the verification of drafts: B rows of S tokens,
each row at its own offset in its own slot. The states stay with the step (with the ranks, once traced).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_infer.context import current_context
from nxd_infer.errors import ModelConfigError
from nxd_infer.layout import gqa_plan
from nxd_infer.modules.lora import AdapterRows
from nxd_infer.ops import remember_last, remember_tokens, step_rows
from nxd_infer.ops.attention import cache_shape
from nxd_models.rope import share_rotary
from nxd_models.serving.adapter_slots import AdapterSlots
from nxd_models.serving.kv_cache import LayerCache, StateList
from nxd_models.serving.sampling import allowed_words, sample
from nxd_models.serving.task_options import BIAS_SLOTS
from nxd_models.spec import DecoderConfig


def _input(role: str, default: float | None = None) -> dict[str, Any]:
    return {"role": role} if default is None else {"role": role, "default": default}


class DecoderStep(nn.Module):
    """Mixin for a causal language model: ``slots`` caches of ``max_len`` positions; maps tokens to the next token.

        class LlamaStep(DecoderStep, CausalLM): ...

    The model is built as ``CausalLM(config, dtype)``. It has ``hidden_states(ids [B, S], positions [B, S], caches)``,
    which returns the final hidden states [B, S, E] (``caches`` is one :class:`LayerCache` per layer; its key and value
    heads are placed on the ranks by ``nxd_infer.layout.gqa_plan``), and ``logits(hidden)``, which returns logits of the
    full vocabulary on every rank. Its results for the padding after a row's ``length`` are ignored, but must be
    computable: positions there may exceed the context. The step's parameters are the model's, under their names.

    Row b uses the slot ``block_table[b, 0]`` (0 .. slots-1; ``slots`` itself is the scratch slot, for idle rows). It
    feeds ``length[b]`` tokens at the positions ``start[b] ...`` and samples the next one. A step with ``start = 0``
    begins a new sequence in its slot. Rows of one step have different slots; but in a step of one token per row,
    several may feed tokens of one sequence at different positions, as if one step fed each in turn.

    A token id of -1 in a step of one token stands for the slot's last sampled token, so that the next step can be
    queued before this one's result is known. Not in a model traced as a pipeline, whose first stage embeds the token
    that the last one samples: there other rows' steps are queued meanwhile.

    A step of exactly ``draft_tokens + 1`` tokens verifies drafts: a row feeds its last token and up to ``draft_tokens``
    guesses of what follows, and gets the model's next token after each of them, sampled as a separate step would
    sample it. The leading guesses that equal it are right; the next step overwrites the keys and values of the others
    before anything reads them. Their counts are not undone, so a row with guesses must have no penalties until its
    slot begins anew; ``prompt_length`` must be given.

    With ``gives`` a step also returns, for a head that guesses from them, the hidden states of the tokens that it is
    fed. "eagle": after the final norm; "eagle3": what the layers 2, n // 2 and n - 3 of n are given, side by side.
    """

    # Provided by the model.
    config: DecoderConfig
    hidden_states: Callable[[Tensor, Tensor, Sequence[LayerCache]], Tensor]
    decoder: Any  # only with ``gives``
    logits: Callable[[Tensor], Tensor]

    shortest_prompt = 1
    """Positions per row of the smallest step that may begin a sequence."""

    token_counts: Tensor
    prompt_seen: Tensor
    last_token: Tensor

    nxd_inputs: dict[str, dict[str, Any]] = {
        "tokens": _input("tokens"),
        "start": _input("start"),
        "length": _input("length"),
        "block_table": _input("block_table"),
        **{name: _input("sampling", field.off) for name, field in SAMPLER_FIELDS.items()},
        "seed": _input("sampling", 0),
        "allowed": _input("allowed_tokens", -1),
        "bias_ids": _input("bias_ids", 0),
        "bias_values": _input("bias_values", 0.0),
        "prompt_length": _input("prompt_length", -1),
    }
    nxd_outputs: dict[str, dict[str, Any]] = {
        "token": {"role": "token"},
        "logprob": {"role": "logprob"},
        "top_ids": {"role": "top_ids"},
        "top_logprobs": {"role": "top_logprobs"},
    }

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype = torch.float32,
        *,
        slots: int,
        max_len: int,
        bias_slots: int = BIAS_SLOTS,
        adapters: AdapterSlots | None = None,
        draft_tokens: int = 0,
        kv_cache_dtype: torch.dtype | None = None,
        gives: str | None = None,
    ):
        super().__init__(config, dtype)
        if slots < 1:
            raise ModelConfigError(f"slots = {slots}: at least one is needed")
        config.check_cached_length(max_len)
        if draft_tokens:
            config.check_drafts(max_len)
        if current_context().pp.degree == 1:  # a later stage would be handed the tables of the first
            share_rotary(self)
        elif gives:
            raise ModelConfigError(f"hidden_states = {gives!r}: pipeline stages give none; trace with pp_degree = 1")
        self.gives = gives
        if gives:
            self.nxd_outputs = {**self.nxd_outputs, "hidden": {"role": "hidden"}}
        self.draft_tokens = draft_tokens
        self.slots, self.max_len, self.bias_slots = slots, max_len, bias_slots
        largest = {
            "tokens": config.vocab_size - 1,
            "start": max_len - 1,
            "length": max_len,
            "block_table": slots,
            "bias_ids": config.vocab_size - 1,
        }
        self.remembers_last = current_context().pp.degree == 1
        least = {"tokens": -1 if self.remembers_last else 0}
        ranges = {name: {"minimum": least.get(name, 0), "maximum": top} for name, top in largest.items()}
        self.nxd_inputs = {name: {**entry, **ranges.get(name, {})} for name, entry in self.nxd_inputs.items()}
        self.adapter_slots = adapters
        self.adapter_rows = AdapterRows()
        if adapters is not None:
            self.adapter_rows = adapters.add_to(self)
            self.nxd_inputs["adapter"] = adapters.input()
        layers = config.num_layers
        kv_heads = gqa_plan(config.num_heads, config.num_kv_heads, current_context().tp.degree).kv_heads_per_rank
        held = kv_cache_dtype or dtype
        self.cache_shape = cache_shape(slots + 1, kv_heads, max_len, config.head_dim, held)
        self.k_cache = StateList(layers, self.cache_shape, held)
        self.v_cache = StateList(layers, self.cache_shape, held)
        vocabulary = (slots + 1, config.vocab_size)
        self.register_buffer("token_counts", torch.zeros(vocabulary, dtype=torch.int32), persistent=False)
        self.register_buffer("prompt_seen", torch.zeros(vocabulary, dtype=torch.bool), persistent=False)
        if self.remembers_last:
            self.register_buffer("last_token", torch.zeros(slots + 1, dtype=torch.int64), persistent=False)

    @property
    def nxd_states(self) -> list[str]:
        """Names of the buffers that a step changes in place."""
        layers = range(self.config.num_layers)
        caches = [f"{cache}.{i}" for i in layers for cache in ("k_cache", "v_cache")]
        return [*caches, "token_counts", "prompt_seen", *(["last_token"] if self.remembers_last else [])]

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        length: Tensor,
        block_table: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        allowed: Tensor,
        bias_ids: Tensor,
        bias_values: Tensor,
        presence_penalty: Tensor,
        frequency_penalty: Tensor,
        repetition_penalty: Tensor,
        prompt_length: Tensor,
        adapter: Tensor | None = None,
        hidden: Tensor | None = None,
        ahead: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Feed ``length`` tokens per row, and sample the next.

        Args:
            tokens: int64 [B, S]; entries past ``length`` are ignored.
            start, length: int64 [B]; ``start + length <= max_len``. A row with ``length = 0`` changes nothing.
            block_table: int64 [B, 1], the slot.
            temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty: float32 [B].
            top_k, seed: int64 [B].
            allowed: int32 [B, ceil(V/32)] bits; bias_ids, bias_values: int64 and float32 [B, bias_slots].
            prompt_length: int64 [B]; positions before it are prompt, the others output, which penalties distinguish. If
                it is -1, tokens fed one at a time after the first position count as output and all others as prompt.
            adapter: int64 [B], the slot of each row's adapter, 0 for none; only in a step with ``adapters``.
            hidden, ahead: only of a head; see ``nxd_models.eagle.model``.

        Returns:
            token [B, Q] int64, logprob [B, Q] float32, top_ids [B, Q, 20] int64, top_logprobs [B, Q, 20] float32, with
            Q = S if drafts are verified (entries past ``length`` are meaningless) and Q = 1 otherwise (meaningless
            unless the row completes its prompt). With ``gives`` also hidden [B, S, F] float32.
        """
        tokens, start, length, prompt_length = self.fed(tokens, start, length, block_table, prompt_length)
        B, S = tokens.shape
        verifies = self.draft_tokens > 0 and self.draft_tokens + 1 == S
        last_token = self.last_token if self.remembers_last else None
        ids, positions, slot_B, output_BS, end_B, next_B = step_rows(
            tokens, start, length, block_table, last_token, prompt_length, self.config.vocab_size, self.slots
        )
        caches = [
            LayerCache(self.k_cache[i], self.v_cache[i], block_table, start, length)
            for i in range(self.config.num_layers)
        ]
        with self.adapter_rows.use(adapter):
            hidden_BQE, given_BSF = self.states(ids, positions, caches, hidden, tokens < 0, slot_B, end_B)
            if not verifies and S > 1:
                hidden_BQE = hidden_BQE.gather(1, end_B[:, None, None].expand(-1, 1, hidden_BQE.shape[-1]))
            logits_RV = self.logits(hidden_BQE).flatten(0, 1)

        if ahead is not None:
            next_B = next_B + ahead
        remember_tokens(self.token_counts, self.prompt_seen, ids, output_BS, start, length, slot_B)

        def each(x_B: Tensor) -> Tensor:
            """Repeat a row's setting for every sampled position."""
            return x_B.repeat_interleave(S, 0) if verifies else x_B

        token, logprob, top_ids, top_logprobs = sample(
            logits_RV,
            each(temperature),
            each(top_k),
            each(top_p),
            each(min_p),
            each(seed),
            (positions + 1).flatten() if verifies else next_B,
            each(allowed),
            each(bias_ids),
            each(bias_values),
            counts=self.token_counts,
            seen=self.prompt_seen,
            slot=each(slot_B),
            presence_penalty=each(presence_penalty),
            frequency_penalty=each(frequency_penalty),
            repetition_penalty=each(repetition_penalty),
        )
        token_BQ = token.unflatten(0, (B, -1))
        if self.remembers_last:
            last_B = self._last(token_BQ, ids, length) if verifies else token
            remember_last(self.last_token, last_B, start, slot_B, self.slots, S == 1)
        given = {} if given_BSF is None else {"hidden": given_BSF.float()}
        return {
            **given,
            "token": token_BQ,
            "logprob": logprob.unflatten(0, (B, -1)),
            "top_ids": top_ids.unflatten(0, (B, -1)),
            "top_logprobs": top_logprobs.unflatten(0, (B, -1)),
        }

    def states(
        self, ids_BS: Tensor, positions_BS: Tensor, caches: Sequence[LayerCache], *own: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the final hidden states, and those that a head is to be given, if any. ``own`` is for a head: its
        input, which tokens are the slot's last guess, the slots, and the place of each last token."""
        if not self.gives:
            return self.hidden_states(ids_BS, positions_BS, caches), None
        entered: list[Tensor] = []
        final = self.decoder(ids_BS, positions_BS, None, caches, entered)
        if self.gives == "eagle":
            return final, final
        layers = len(entered)
        return final, torch.cat([entered[i] for i in (2, layers // 2, layers - 3)], -1)

    def fed(
        self, tokens: Tensor, start: Tensor, length: Tensor, block_table: Tensor, prompt_length: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what the decoder is fed for a step's tokens, as they are named there."""
        return tokens, start, length, prompt_length

    def _last(self, token_BS: Tensor, ids_BS: Tensor, length_B: Tensor) -> Tensor:
        """Return the token [B] after the last right guess of each row."""
        place = torch.arange(self.draft_tokens, device=ids_BS.device)
        right = (token_BS[:, :-1] == ids_BS[:, 1:]) & (place + 1 < length_B[:, None])
        count_B1 = torch.where(right, self.draft_tokens, place).amin(1, keepdim=True)
        return token_BS.gather(1, count_B1)[:, 0]


def step_inputs(
    vocab_size: int, batch: int, length: int, slots: int, bias_slots: int = BIAS_SLOTS, *, adapter: bool = False
) -> dict[str, Tensor]:
    """Return the inputs of a :class:`DecoderStep` for ``batch`` rows of ``length`` tokens, by name, with defaults.

    Every row is idle: its slot is the scratch slot and its length 0. ``adapter``: include the input of adapter slots.
    """
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "tokens": ((batch, length), torch.int64),
        "start": ((batch,), torch.int64),
        "length": ((batch,), torch.int64),
        "block_table": ((batch, 1), torch.int64),
        "top_k": ((batch,), torch.int64),
        "seed": ((batch,), torch.int64),
        "allowed": ((batch, allowed_words(vocab_size)), torch.int32),
        "bias_ids": ((batch, bias_slots), torch.int64),
        "bias_values": ((batch, bias_slots), torch.float32),
        "prompt_length": ((batch,), torch.int64),
    }
    out = {}
    for name, entry in DecoderStep.nxd_inputs.items():
        shape, dtype = shapes.get(name, ((batch,), torch.float32))
        out[name] = torch.full(shape, slots if name == "block_table" else entry.get("default", 0), dtype=dtype)
    if adapter:
        out["adapter"] = torch.zeros(batch, dtype=torch.int64)
    return out
