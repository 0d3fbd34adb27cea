"""Every LoRA layer equals ``base(x) + scaling * B A x``, forward and backward, at every degree and option."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.layout import AxisPlan, layout_of
from nxd_infer.modules.lora import LoraConfig
from nxd_infer.modules.lora.layers import LoraLayer, lora_layer
from nxd_infer.modules.qkv_linear import PARTS, GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, mappings
from nxd_infer.parallel_layers.layer_norm import mark_sequence_parallel
from tests.support.parallel_layers.compare import LIMITS, as_on_ranks, error, failures, own_part, piece
from tests.support.ranks import run_ranks

IN, OUT, RANK, ROWS = 12, 16, 3, 8
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=6)
Found = dict[str, float]


def random(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def adapted(base: nn.Module, config: LoraConfig = CONFIG) -> tuple[LoraLayer, dict[str, tuple[Tensor, Tensor]]]:
    """The LoRA layer with its base frozen and random factors, and those whole, by part."""
    layer = lora_layer(base.requires_grad_(False), config)
    whole = {}
    for number, (part, *pair) in enumerate(layer.factors()):
        tensors = []
        for which, factor in enumerate(pair):
            weight = factor.get_parameter("weight")
            layout = layout_of(factor, "weight")
            shape = tuple(plan.size for plan in layout.axes) if layout else tuple(weight.shape)
            tensors.append(random(*shape, dtype=weight.dtype, seed=10 + 2 * number + which).requires_grad_())
            weight.data.copy_(own_part(factor, "weight", tensors[-1].detach()))
        whole[part] = (tensors[0], tensors[1])
    return layer, whole


def compare_factors(found: Found, name: str, layer: LoraLayer, whole: dict[str, tuple[Tensor, Tensor]]) -> None:
    for part, *pair in layer.factors():
        for kind, factor, plain in zip("AB", pair, whole[part], strict=True):
            wanted = own_part(factor, "weight", plain.grad)  # pyright: ignore[reportArgumentType]
            found[f"{name} {part} {kind} grad"] = error(factor.weight.grad, wanted)  # pyright: ignore
    assert all(param.grad is None for param in layer.base_layer.parameters())


def compare_linear(found: Found, name: str, base: Any, plain: nn.Linear, whole_in: Any, whole_out: Any) -> None:
    """``whole_in`` takes this rank's input from the whole one, ``whole_out`` its output."""
    dtype = plain.weight.dtype
    layer, factors = adapted(base)
    a, b = factors[""]
    x_plain = random(ROWS, 2, plain.in_features, dtype=dtype).requires_grad_()
    x = whole_in(x_plain.detach()).clone().requires_grad_()
    weights = random(ROWS, 2, plain.out_features, dtype=dtype, seed=5)
    expected = plain(x_plain) + CONFIG.scaling * F.linear(F.linear(x_plain, a), b)
    (expected * weights).sum().backward()
    shared = getattr(base, "input_is_shared", False)
    y = layer(mappings.copy_to_tensor_model_parallel_region(x) if shared else x)
    y = y[0] + y[1] if isinstance(y, tuple) else y
    if not getattr(base, "reduce_output", True):
        y = mappings.reduce_from_tensor_model_parallel_region(y)
    found[name] = error(y, whole_out(expected))
    (y * whole_out(weights)).sum().backward()
    found[f"{name} input grad"] = error(x.grad, whole_in(x_plain.grad))
    compare_factors(found, name, layer, factors)
    compare_merged(found, name, layer, x)


def compare_merged(found: Found, name: str, layer: LoraLayer, x: Tensor) -> None:
    layer.eval()
    before = {key: value.clone() for key, value in layer.base_layer.state_dict().items()}
    outputs = as_tuple(layer(x))
    layer.merge()
    for number, (one, other) in enumerate(zip(as_tuple(layer(x)), outputs, strict=True)):
        found[f"{name} merged {number}"] = error(one, other)
    layer.unmerge()
    after = layer.base_layer.state_dict()
    found[f"{name} unmerged"] = 0.0 if all(torch.equal(after[key], before[key]) for key in before) else float("inf")


def as_tuple(value: Any) -> tuple:
    return tuple(one for one in value if one is not None) if isinstance(value, tuple) else (value,)


def whole(x: Tensor) -> Tensor:
    return x


def rows(x: Tensor) -> Tensor:
    return piece(x, 0)


def columns(x: Tensor) -> Tensor:
    return piece(x, -1)


def plain_linear(dtype: torch.dtype, size_in: int = IN, size_out: int = OUT) -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(size_in, size_out, dtype=dtype)


def column_cases(dtype: torch.dtype) -> Found:
    found: Found = {}
    for gather, how in itertools.product((True, False), ("plain", "sequence", "shared", "skip")):
        torch.manual_seed(7)
        base = ColumnParallelLinear(
            IN,
            OUT,
            gather_output=gather,
            dtype=dtype,
            sequence_parallel_enabled=how == "sequence",
            input_is_shared=how == "shared",
            skip_bias_add=how == "skip",
        )
        whole_in, whole_out = rows if how == "sequence" else whole, whole if gather else columns
        compare_linear(found, f"column {how} gather={gather}", base, plain_linear(dtype), whole_in, whole_out)
    torch.manual_seed(7)
    base = ColumnParallelLinear(IN, 10, dtype=dtype, output_plan=AxisPlan.padded(10, 4))
    compare_linear(found, "column padded", base, plain_linear(dtype, IN, 10), whole, whole)
    base = ColumnParallelLinear(IN, 10, dtype=dtype, pad=True, pad_alignment_size_per_rank=8, keep_padded_output=True)
    layer, _ = adapted(base)
    x = random(2, IN, dtype=dtype)
    found["keep_padded_output"] = error(layer(x)[:, 10:], base(x)[:, 10:])
    return found


def row_cases(dtype: torch.dtype) -> Found:
    found: Found = {}
    for how in ("plain", "scatters", "sequence", "partial", "skip"):
        torch.manual_seed(7)
        base = RowParallelLinear(
            OUT,
            IN,
            input_is_parallel=how != "scatters",
            sequence_parallel_enabled=how == "sequence",
            dtype=dtype,
            reduce_output=how != "partial",
            skip_bias_add=how in ("skip", "partial"),
        )
        plain = plain_linear(dtype, OUT, IN)
        if how == "partial":  # each rank would add the bias
            base = RowParallelLinear(OUT, IN, False, True, dtype=dtype, reduce_output=False)
            base.weight.data.copy_(own_part(base, "weight", plain.weight.detach()))
            plain.bias.data.zero_()
        whole_in, whole_out = whole if how == "scatters" else columns, rows if how == "sequence" else whole
        compare_linear(found, f"row {how}", base, plain, whole_in, whole_out)
    torch.manual_seed(7)
    base = RowParallelLinear(10, IN, dtype=dtype, input_plan=AxisPlan.padded(10, 4))
    compare_linear(found, "row padded", base, plain_linear(dtype, 10, IN), whole, whole)
    return found


def embedding_cases(dtype: torch.dtype) -> Found:
    found: Found = {}
    for across, sequence in itertools.product((True, False), repeat=2):
        name = f"embedding across={across} sequence={sequence}"
        torch.manual_seed(7)
        options = {"shard_across_embedding": across, "sequence_parallel_enabled": sequence, "padding_idx": 2}
        options["sequence_dimension"] = 0
        base = ParallelEmbedding(12, 8, dtype=dtype, **options)
        compare_embedding(found, name, base, rows if sequence else whole)
    torch.manual_seed(7)
    compare_embedding(found, "plain embedding", nn.Embedding(12, 8, 2, dtype=dtype), whole)
    base = nn.Embedding(12, 8, 2, dtype=dtype)  # of positions, say, each rank looking its own up
    mark_sequence_parallel(base.weight)
    layer, factors = adapted(base)
    (a, b), weights = factors[""], random(ROWS, 2, 8, dtype=dtype)
    ids = torch.arange(ROWS * 2).view(ROWS, 2) % 12
    (layer(rows(ids)) * rows(weights)).sum().backward()
    (CONFIG.scaling * F.linear(F.embedding(ids, a, 2), b) * weights).sum().backward()
    compare_factors(found, "plain embedding sequence", layer, factors)
    return found


def compare_embedding(found: Found, name: str, base: Any, whole_out: Any) -> None:
    dtype = base.weight.dtype
    torch.manual_seed(7)
    plain = nn.Embedding(12, 8, 2, dtype=dtype)
    layer, factors = adapted(base)
    a, b = factors[""]
    ids = torch.randint(0, 12, (ROWS, 3), generator=torch.Generator().manual_seed(2))
    expected = plain(ids) + CONFIG.scaling * F.linear(F.embedding(ids, a, 2), b)
    weights = random(*expected.shape, dtype=dtype, seed=5)
    (expected * weights).sum().backward()
    y = layer(ids)
    found[name] = error(y, whole_out(expected))
    (y * whole_out(weights)).sum().backward()
    compare_factors(found, name, layer, factors)
    compare_merged(found, name, layer, ids)


PAIRS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
"""Of three options, any two in every combination."""


def qkv_cases(dtype: torch.dtype) -> Found:
    found: Found = {}
    for q, kv, options, ways in (
        (16, 8, {}, itertools.product((True, False), repeat=3)),
        (12, 4, {"head_dim": 4}, PAIRS),  # one key/value head on two ranks
        (16, 4, {"head_dim": 2, "kv_size_multiplier": 2}, PAIRS),
        (16, 4, {"kv_size_multiplier": 2}, PAIRS),
    ):
        for fuse, gather, sequence in ways:
            torch.manual_seed(3)
            base = GQAQKVColumnParallelLinear(
                IN,
                [q, kv],
                gather_output=gather,
                sequence_parallel_enabled=sequence,
                fuse_qkv=fuse,
                dtype=dtype,
                **options,
            )
            compare_qkv(found, f"qkv {q}/{kv} {options} fuse={fuse} gather={gather} sequence={sequence}", base)
    return found


def compare_qkv(found: Found, name: str, base: GQAQKVColumnParallelLinear) -> None:
    """Against three linear layers and a weight in the loss for every place on the ranks."""
    dtype = next(base.parameters()).dtype
    torch.manual_seed(3)
    plain = {part: nn.Linear(IN, base.q_size if part == "q" else base.kv_size, dtype=dtype) for part in PARTS}
    layer, factors = adapted(base)
    x_plain = random(ROWS, 2, IN, dtype=dtype).requires_grad_()
    whole_in = rows if base.sequence_parallel_enabled else whole
    x = whole_in(x_plain.detach()).clone().requires_grad_()
    loss, loss_plain = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)
    for part, y in zip(PARTS, layer(x), strict=True):
        a, b = factors[part]
        expected = plain[part](x_plain) + CONFIG.scaling * F.linear(F.linear(x_plain, a), b)
        expected, mine = as_on_ranks(base, part, expected)
        weights = random(*expected.shape, dtype=dtype, seed=9)
        found[f"{name} {part}"] = error(y, mine(expected))
        loss, loss_plain = loss + (y * mine(weights)).sum(), loss_plain + (expected * weights).sum()
    loss.backward()
    loss_plain.backward()
    found[f"{name} input grad"] = error(x.grad, whole_in(x_plain.grad))
    compare_factors(found, name, layer, factors)
    compare_merged(found, name, layer, x)


def plain_cases(dtype: torch.dtype) -> Found:
    found: Found = {}
    compare_linear(found, "nn.Linear", plain_linear(dtype), plain_linear(dtype), whole, whole)
    torch.manual_seed(7)
    base = nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), padding_mode="circular", dtype=dtype)
    layer, factors = adapted(base)
    a, b = factors[""]
    x, x_plain = (random(2, 4, 7, 8, dtype=dtype).requires_grad_() for _ in range(2))
    delta = CONFIG.scaling * (b.flatten(1) @ a.flatten(1)).view_as(base.weight)
    padded = F.pad(x_plain, (1, 1, 1, 1), "circular")
    expected = F.conv2d(padded, base.weight + delta, base.bias, 2, 0, (1, 2))
    y, weights = layer(x), random(*expected.shape, dtype=dtype, seed=5)
    found["conv"] = error(y, expected)
    (expected * weights).sum().backward()
    (y * weights).sum().backward()
    found["conv input grad"] = error(x.grad, x_plain.grad)  # pyright: ignore[reportArgumentType]
    compare_factors(found, "conv", layer, factors)
    compare_merged(found, "conv", layer, x)
    return found


def all_cases(dtype: torch.dtype) -> list[str]:
    cases = (column_cases, row_cases, embedding_cases, qkv_cases, plain_cases)
    found: Found = {}
    for case in cases:
        found |= case(dtype)
    assert len(found) > 200
    return failures(found, LIMITS[dtype])


@pytest.mark.filterwarnings("ignore:kv_size_multiplier")
@pytest.mark.parametrize(("dtype", "ranks"), [(torch.float64, 1), (torch.float32, 2), (torch.float64, 4)], ids=str)
def test_every_layer(dtype: torch.dtype, ranks: int):
    """Four are more ranks than key/value heads, and than whole pieces of what is padded."""
    found = [all_cases(dtype)] if ranks == 1 else run_ranks(all_cases, ranks, dtype)
    assert found == [[]] * ranks
