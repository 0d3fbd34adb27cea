"""Medusa's trees: candidates of several heads that one pass verifies.

A choice is a path from the root, the last token: ``(0, 2)`` is the third best token of the second head, after the best
one of the first. Node 0 of a tree of n nodes is the root; the others are in order of length, then of path.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nxd_infer.errors import InputMismatchError

TOPK = 10
"""Tokens of each head among which choices choose."""


def generate_medusa_buffers(
    medusa_choices: Sequence[Sequence[int]], device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Return what describes the tree of ``medusa_choices``.

    ``medusa_attn_mask`` [1, 1, n, n], float: 1 where a node attends, to itself and what it follows.
    ``tree_indices`` [n]: each node's place among the root and the heads' tokens.
    ``medusa_position_ids`` [n]: distances from the root.
    ``retrieve_indices`` [paths, longest]: the nodes from the root to each leaf, -1 after the end.

    Raises InputMismatchError for a choice whose parent is none, or that is not among the heads' tokens.
    """
    paths = [(), *sorted({tuple(choice) for choice in medusa_choices} - {()}, key=lambda path: (len(path), path))]
    node_of = {path: node for node, path in enumerate(paths)}
    for path in paths[1:]:
        if path[:-1] not in node_of or not 0 <= path[-1] < TOPK:
            raise InputMismatchError(f"choice {path} needs its parent {path[:-1]}, and numbers of 0 to {TOPK - 1}")
    lines = [[node_of[path[:length]] for length in range(len(path) + 1)] for path in paths]
    mask = torch.zeros(len(paths), len(paths))
    for node, line in enumerate(lines):
        mask[node, line] = 1
    inner = {path[:-1] for path in paths[1:]}
    leaves = [line for path, line in zip(paths, lines, strict=True) if path not in inner]
    longest = max(map(len, leaves))
    buffers = {
        "medusa_attn_mask": mask[None, None],
        "tree_indices": torch.tensor([1 + TOPK * (len(path) - 1) + path[-1] if path else 0 for path in paths]),
        "medusa_position_ids": torch.tensor([len(path) for path in paths]),
        "retrieve_indices": torch.tensor([line + [-1] * (longest - len(line)) for line in leaves]),
    }
    return {name: buffer.to(device) for name, buffer in buffers.items()}


def generate_candidates(
    medusa_logits: Tensor, logits: Tensor, tree_indices: Tensor, retrieve_indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the candidates' tokens [paths, longest] (0 after the end), and those of the tree's nodes [1, n].

    ``logits`` [1, s, vocabulary] are the model's, ``medusa_logits`` [heads, 1, s, vocabulary] the heads', of which the
    last position counts.
    """
    heads = medusa_logits[:, 0, -1].topk(TOPK, dim=-1).indices
    tree = torch.cat((logits[0, -1].argmax()[None], heads.flatten()))[tree_indices]
    return torch.cat((tree, tree.new_zeros(1)))[retrieve_indices], tree[None]


def evaluate_posterior(logits: Tensor, candidates: Tensor) -> tuple[Tensor, int]:
    """Return the candidate of which the model agrees with most, the first of several, and how many tokens after its
    first one these are.

    ``logits`` [paths, longest, vocabulary] are the model's after each token of ``candidates`` [paths, longest].
    """
    agreed = (candidates[:, 1:] == logits[:, :-1].argmax(-1)).cumprod(1).sum(1)
    best = agreed.argmax()
    return best, int(agreed[best])
