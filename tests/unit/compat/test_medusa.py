"""Medusa's trees against their definition, path by path."""

from __future__ import annotations

import pytest
import torch

from nxd_infer.compat.medusa import TOPK, evaluate_posterior, generate_candidates, generate_medusa_buffers
from nxd_infer.errors import InputMismatchError

CHOICES = [(1,), (0,), (0, 0), (0, 1), (1, 0), (0, 0, 3)]
PATHS = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 3)]
LEAVES = [(0, 1), (1, 0), (0, 0, 3)]


def test_the_buffers_describe_the_tree_of_the_choices():
    buffers = generate_medusa_buffers(CHOICES)
    assert buffers["medusa_position_ids"].tolist() == [len(path) for path in PATHS]
    for i, path in enumerate(PATHS):
        for j, other in enumerate(PATHS):
            assert buffers["medusa_attn_mask"][0, 0, i, j] == (path[: len(other)] == other)
    for row, leaf in zip(buffers["retrieve_indices"].tolist(), LEAVES, strict=True):
        nodes = [PATHS.index(leaf[:length]) for length in range(len(leaf) + 1)]
        assert row == nodes + [-1] * (4 - len(nodes))


def test_candidates_are_the_heads_best_tokens_along_each_path():
    torch.manual_seed(0)
    logits, heads = torch.randn(1, 2, 50), torch.randn(3, 1, 2, 50)
    buffers = generate_medusa_buffers(CHOICES)
    candidates, tree = generate_candidates(heads, logits, buffers["tree_indices"], buffers["retrieve_indices"])
    best = heads[:, 0, -1].argsort(dim=-1, descending=True)
    tokens = [[int(logits[0, -1].argmax()), *(int(best[i, at]) for i, at in enumerate(path))] for path in PATHS]
    assert tree[0].tolist() == [line[-1] for line in tokens]
    expected = [tokens[PATHS.index(leaf)] for leaf in LEAVES]
    assert candidates.tolist() == [line + [0] * (4 - len(line)) for line in expected]


@pytest.mark.parametrize("agreed", [(0, 0, 0), (1, 2, 2), (0, 1, 3), (2, 0, 1)])
def test_the_longest_agreement_with_the_model_is_taken_and_the_first_of_equals(agreed: tuple[int, ...]):
    candidates = torch.randint(0, 20, (3, 4), generator=torch.Generator().manual_seed(1))
    said = torch.zeros(3, 4, 20)
    for row, count in enumerate(agreed):
        for at in range(3):
            said[row, at, (int(candidates[row, at + 1]) + (at == count)) % 20] = 1
    best, length = evaluate_posterior(said, candidates)
    assert (int(best), length) == (agreed.index(max(agreed)), max(agreed))


@pytest.mark.parametrize("wrong", [[(0, 1)], [(TOPK,)]])
def test_a_choice_without_its_parent_or_beyond_the_heads_tokens_is_an_error(wrong: list):
    with pytest.raises(InputMismatchError, match="needs its parent"):
        generate_medusa_buffers(wrong)
