"""The bookkeeping of a generation step as two operators: some twenty of PyTorch's, on a few numbers each, take as long
as a layer, because between two steps the weights push their code out of the caches.

Shapes: B rows, S tokens per row, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer.ops.composite import composite


def _step_rows_fake(tokens, start, length, block_table, last_token, prompt_length, vocabulary, scratch):
    rows, row = (tokens.new_empty(shape, dtype=torch.int64) for shape in (tokens.shape, tokens.shape[:1]))
    output = tokens.new_empty(tokens.shape, dtype=torch.bool)
    return rows, torch.empty_like(rows), row, output, torch.empty_like(row), torch.empty_like(row)


@composite(
    "step_rows(Tensor tokens, Tensor start, Tensor length, Tensor block_table, Tensor? last_token, "
    "Tensor prompt_length, int vocabulary, int scratch) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _step_rows_fake,
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
    S = tokens_BS.shape[1]
    slot_B = torch.where(length_B > 0, block_table[:, 0], scratch)
    ids_BS = tokens_BS
    if last_token_N is not None:
        ids_BS = torch.where(tokens_BS < 0, last_token_N.index_select(0, slot_B)[:, None], tokens_BS)
    ids_BS = ids_BS.clamp(0, vocabulary - 1)
    positions_BS = start_B[:, None] + torch.arange(S, device=tokens_BS.device)
    guess_BS = (tokens_BS < 0) | (start_B > 0)[:, None] if S == 1 else tokens_BS < 0
    output_BS = torch.where((prompt_length_B >= 0)[:, None], positions_BS >= prompt_length_B[:, None], guess_BS)
    return ids_BS, positions_BS, slot_B, output_BS, (length_B - 1).clamp(min=0), start_B + length_B


@composite(
    "remember_last(Tensor(a!) last_token, Tensor token, Tensor start, Tensor slot, int scratch, bool pieces) -> ()",
    lambda *arguments: None,
)
def remember_last(
    last_token_N: Tensor, token_B: Tensor, start_B: Tensor, slot_B: Tensor, scratch: int, pieces: bool
) -> None:
    """Keep the token of each row in its slot, in place. ``pieces``: several rows may have tokens of one slot, of which
    the one with the highest ``start`` counts; the line ``scratch`` is meaningless."""
    if pieces:
        behind_BB = (slot_B[:, None] == slot_B) & (start_B[:, None] < start_B)
        slot_B = torch.where(behind_BB.any(1), scratch, slot_B)
    torch.ops.aten.index_put_(last_token_N, [slot_B], token_B)
