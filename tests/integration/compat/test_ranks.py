"""Names that mean something on several ranks only, each against its meaning on the whole tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer import parallel_state as ps
from nxd_infer.compat.attention import nki_flash_attn_func, nki_ring_attn_func
from nxd_infer.compat.sampling import Sampler
from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers import grads, mappings, search
from nxd_infer.parallel_layers.layers import (
    BaseParallelLinear,
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    create_local_weight,
)
from nxd_infer.trace import parallel_model_trace
from tests.support.ranks import run_ranks


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def own(x: Tensor, dim: int) -> Tensor:
    tp = current_context().tp
    return x.chunk(tp.degree, dim)[tp.rank]


def moves() -> list[bool]:
    x, group = random(4, 6, 2), ps.get_tensor_model_parallel_group()
    rank = current_context().tp.rank
    mine, summed, highest = x * (1 + rank), x * 3, torch.maximum(x, x * 2)
    pairs = [
        (mappings._gather_along_dim(own(x, 1), 1, process_group=group), x),
        (mappings._gather_along_dim(own(x, 1), 1, None, True), x),
        (mappings._gather_along_first_dim(own(x, 0)), x),
        (mappings._gather_along_last_dim(own(x, 2)), x),
        (mappings._split_along_first_dim(x), own(x, 0)),
        (mappings._split_along_last_dim(x), own(x, 2)),
        (mappings._split_along_dim(x, 1), own(x, 1)),
        (mappings._reduce(mine), summed),
        (mappings._reduce(mine, "max"), highest),
        (mappings._reduce_scatter_along_dim(mine, 1), own(summed, 1)),
        (mappings._reduce_scatter_along_dim(mine, 1, "max", process_group=group), own(highest, 1)),
        (mappings._reduce_scatter_along_first_dim(mine), own(summed, 0)),
        (mappings._reduce_scatter_along_last_dim(mine), own(summed, 2)),
        (mappings.scatter_to_process_group_spmd(x, 1, torch.tensor([rank]), group), own(x, 1)),
    ]
    gradients = [x * (1.0 + rank), (x * (3.0 + rank)).float()]
    grads.bucket_allreduce_gradients(gradients)  # tensor parallel ranks are no data parallel ones
    pairs.append((gradients[0], x * (1.0 + rank)))
    return [torch.allclose(found, wanted) and found.dtype == wanted.dtype for found, wanted in pairs]


def averages() -> list[Tensor]:
    gradients = [torch.full((2,), 1.0 + current_context().dp.rank), torch.full((1,), 4.0).double()]
    grads.bucket_allreduce_gradients(iter(gradients))
    return gradients


def test_plain_moves_and_averages():
    assert all(all(found) for found in run_ranks(moves, 2))
    for whole in run_ranks(averages, 2, tp=1):
        assert [one.tolist() for one in whole] == [[1.5, 1.5], [4.0]]


def largest() -> list[bool]:
    x = random(4, 5, 8).round(decimals=1)
    x[0, 0, :] = 1.0  # the first of equal values wins
    mine = own(x, 2)
    values, indices = search.topk(mine, 6, dim=-1, gather_dim=2, stages=1, rank_id=None)
    expected = x.topk(6, -1)
    config = type("Config", (), {"do_sample": False, "on_device_sampling": True})
    by_rows = search.topk(own(x, 0), 2, dim=2, gather_dim=0)
    with pytest.raises(ParallelConfigError, match="k=9 must be from 1 to 8"):
        search.topk(mine, 9, dim=2, gather_dim=2)
    return [
        torch.equal(search.argmax(mine, dim=2, gather_dim=2), x.argmax(2)),
        torch.equal(search.argmax(mine, -1, -1, keepdim=True), x.argmax(2, keepdim=True)),
        torch.equal(values, expected.values) and torch.equal(x.gather(2, indices), values),
        torch.equal(by_rows[0], x.topk(2, 2).values),
        torch.equal(Sampler(config).sample(mine[:, 1]), x[:, 1].argmax(-1)),
    ]


def test_the_largest_values_of_a_vocabulary_that_ranks_share():
    assert all(all(found) for found in run_ranks(largest, 2))


class Searching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = ColumnParallelLinear(6, 8, bias=False, gather_output=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.head(x)
        values, indices = search.topk(logits, 5, dim=-1, gather_dim=-1)
        return search.argmax(logits, dim=-1, gather_dim=-1), values, indices


def searching() -> tuple[nn.Module, dict[Any, Any]]:
    torch.manual_seed(0)
    return Searching(), {}


def test_the_largest_values_in_a_traced_model():
    x = torch.randn(3, 6)
    module = searching()[0]
    with parallel_model_trace(searching, (x,), tp_degree=2) as model:
        found = model(x)
    for one, other in zip(found, module(x), strict=True):
        assert torch.allclose(one.double(), other.double(), atol=1e-6)


def ring(causal: bool) -> list[bool]:
    cp = current_context().cp
    q, k, v = (random(2, heads, 8, 4, seed=heads).requires_grad_() for heads in (4, 2, 2))
    whole = nki_flash_attn_func(q, k, v, causal=causal, transpose_nki_inputs=False)
    weights = random(*whole.shape, seed=9)
    (whole * weights).sum().backward()
    pieces = [one.detach().chunk(cp.degree, 2)[cp.rank].clone().requires_grad_() for one in (q, k, v)]
    mine = nki_ring_attn_func(*pieces, cp.rank, ps.get_context_model_parallel_src_tgt_pairs(), causal=causal)
    (mine * weights.chunk(cp.degree, 2)[cp.rank]).sum().backward()
    found = [mine, *(one.grad for one in pieces)]
    wanted = [one.chunk(cp.degree, 2)[cp.rank] for one in (whole, q.grad, k.grad, v.grad)]  # pyright: ignore
    return [torch.allclose(one, other) for one, other in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("causal", [True, False])
def test_attention_over_a_sequence_that_ranks_share(causal: bool):
    assert all(all(found) for found in run_ranks(ring, 2, causal, cp=2))


def layers() -> list[bool]:
    dtype = torch.float64
    torch.manual_seed(1)
    column = ColumnParallelLinear(6, 8, False, False, dtype, None, 2, None, False, None)  # the reference's order
    torch.manual_seed(2)
    row = RowParallelLinear(8, 6, True, True, dtype, torch.device("cpu"), 1, nn.init.ones_, rank_ordering=None)
    torch.manual_seed(1)
    whole = nn.Linear(6, 8, bias=False, dtype=dtype).weight.detach()
    own_column = create_local_weight(whole, 0, 4, 2)
    place = torch.empty_like(own_column)
    found = [
        torch.equal(column.weight, own_column),
        create_local_weight(whole, 0, 4, 2, out_weight=place) is place and torch.equal(place, own_column),
        isinstance(column, BaseParallelLinear) and isinstance(row, BaseParallelLinear),
        bool((row.weight == 1).all()) and row.weight.dtype == dtype,
        column.tensor_parallel_group.size() == 2 and row.tensor_model_parallel_group.rank() == current_context().rank,
    ]
    column.weight.data.zero_()
    torch.manual_seed(1)
    column.init_weight_cpu()
    found.append(torch.equal(column.weight, own_column))
    bias = row.bias.detach().clone()  # pyright: ignore[reportOptionalMemberAccess]
    row.bias.data.zero_()  # pyright: ignore[reportOptionalMemberAccess]
    row.init_weight_cpu()
    found.append(bool((row.bias == 0).all()))
    torch.manual_seed(2)
    row.initialize_weight_and_bias()
    found.append(bool((row.bias != 0).all()) and bool((row.weight == 1).all()) and bias.shape == row.bias.shape)  # pyright: ignore
    with pytest.raises(ParallelConfigError, match="rank_ordering"):
        RowParallelLinear(8, 6, rank_ordering=[1, 0])
    return found


def embedded(across: bool) -> list[bool]:
    ids = torch.arange(12).view(2, 6) % 9
    ids[0, 0] = 3
    torch.manual_seed(4)
    plain = nn.Embedding(10, 8, 3, dtype=torch.float64)
    torch.manual_seed(4)
    layer = ParallelEmbedding(
        10, 8, 3, None, 2.0, False, False, nn.init.normal_, None, torch.float64, across, False, True
    )  # fmt: skip  (by place in the reference's order: padding_idx third)
    y, expected = layer(ids), plain(ids).transpose(0, 1)
    weights = random(6, 2, 8)
    (y * own(weights, 0)).sum().backward()
    (expected * weights).sum().backward()
    explicit = ParallelEmbedding(10, 8, None, sequence_parallel_enabled=True, sequence_dimension=1)
    assert plain.weight.grad is not None and layer.weight.grad is not None
    return [
        torch.equal(y, own(expected, 0)) and y.shape == (3, 2, 8),
        torch.allclose(layer.weight.grad, own(plain.weight.grad, 1 if across else 0)),
        explicit(ids).shape == (2, 3, 8) and explicit.sequence_dim == 1 and layer.sequence_dim == 0,
        layer.padding_idx == 3 and ParallelEmbedding(10, 8, nn.init.ones_).padding_idx is None,
    ]


def test_layers_by_place_in_the_references_order_and_filled_again():
    assert run_ranks(layers, 2) == [[True] * 8] * 2


@pytest.mark.parametrize("across", [False, True])
def test_an_embedding_of_a_batch_gives_its_piece_of_the_sequence(across: bool):
    """ids [batch, sequence] to [sequence / 2, batch, width], and the gradients of one process."""
    assert all(all(found) for found in run_ranks(embedded, 2, across))
