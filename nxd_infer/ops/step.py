"""The bookkeeping of a generation step as two operators: some twenty of PyTorch's, on a few numbers each, take as long
as a layer, because between two steps the weights push their code out of the caches.

Shapes: B rows, S tokens per row, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("nxd", "FRAGMENT")
_LIBRARY.define(
    "step_rows(Tensor tokens, Tensor start, Tensor length, Tensor block_table, Tensor? last_token, "
    "Tensor prompt_length, int vocabulary, int scratch) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "remember_last(Tensor(a!) last_token, Tensor token, Tensor start, Tensor slot, int scratch, bool pieces) -> ()"
)


def step_rows(
    tokens_BS: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    block_table: Tensor,
    last_token_N: Tensor | None,
    prompt_length_B: Tensor,
    vocabulary: int,
    scratch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what rows are fed: ids and positions, int64 [B, S]; slots, int64 [B]; which ids are output rather than
    prompt, bool [B, S]; the place of the last token and the position after it, int64 [B].

    Args:
        tokens, start, length, prompt_length: int64, as a ``DecoderStep`` takes them; block_table: int64 [B, 1].
        last_token: int64 [N], for which a token of -1 stands; None if nothing is remembered.
        scratch: the slot of rows of length 0.
    """
    return torch.ops.nxd.step_rows(
        tokens_BS, start_B, length_B, block_table, last_token_N, prompt_length_B, vocabulary, scratch
    )


def step_rows_reference(
    tokens: Tensor,
    start: Tensor,
    length: Tensor,
    block_table: Tensor,
    last_token: Tensor | None,
    prompt_length: Tensor,
    vocabulary: int,
    scratch: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    S = tokens.shape[1]
    slot = torch.where(length > 0, block_table[:, 0], scratch)
    ids = tokens
    if last_token is not None:
        ids = torch.where(tokens < 0, last_token.index_select(0, slot)[:, None], tokens)
    ids = ids.clamp(0, vocabulary - 1)
    positions = start[:, None] + torch.arange(S, device=tokens.device)
    guess = (tokens < 0) | (start > 0)[:, None] if S == 1 else tokens < 0
    output = torch.where((prompt_length >= 0)[:, None], positions >= prompt_length[:, None], guess)
    return ids, positions, slot, output, (length - 1).clamp(min=0), start + length


def step_rows_fake(tokens, start, length, block_table, last_token, prompt_length, vocabulary, scratch):
    whole = {"dtype": torch.int64}
    rows, row = tokens.shape, tokens.shape[:1]
    output = tokens.new_empty(rows, dtype=torch.bool)
    return (
        *(tokens.new_empty(rows, **whole), tokens.new_empty(rows, **whole), tokens.new_empty(row, **whole), output),
        *(tokens.new_empty(row, **whole), tokens.new_empty(row, **whole)),
    )


def remember_last(
    last_token_N: Tensor, token_B: Tensor, start_B: Tensor, slot_B: Tensor, scratch: int, pieces: bool
) -> None:
    """Keep the token of each row in its slot, in place. ``pieces``: several rows may have tokens of one slot, of which
    the one with the highest ``start`` counts; the line ``scratch`` is meaningless."""
    torch.ops.nxd.remember_last(last_token_N, token_B, start_B, slot_B, scratch, pieces)


def remember_last_reference(
    last_token: Tensor, token: Tensor, start: Tensor, slot: Tensor, scratch: int, pieces: bool
) -> None:
    if pieces:
        behind_BB = (slot[:, None] == slot) & (start[:, None] < start)
        slot = torch.where(behind_BB.any(1), scratch, slot)
    torch.ops.aten.index_put_(last_token, [slot], token)


def remember_last_fake(last_token, token, start, slot, scratch, pieces):
    return None


for _name, _reference, _fake in (
    ("step_rows", step_rows_reference, step_rows_fake),
    ("remember_last", remember_last_reference, remember_last_fake),
):
    _LIBRARY.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nxd::{_name}", _fake, lib=_LIBRARY)
