"""Channel-parallel convolutions equal nn.Conv2d, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.layers import InputChannelParallelConv2d, OutputChannelParallelConv2d
from tests.support.parallel_layers.compare import LIMITS, error, failures, own_part, piece
from tests.support.ranks import run_ranks

GEOMETRY = [
    {},
    {"stride": 2, "padding": 1},
    {"padding": (2, 1), "dilation": (1, 2)},
    {"padding": "same", "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": "valid", "padding_mode": "replicate"},
]


def make(kind: type, *sizes: int, **options) -> nn.Module:
    torch.manual_seed(13)
    return kind(*sizes, **options)


def image(channels: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(channels)
    return torch.randn(2, channels, 7, 6, dtype=dtype)


def all_cases(dtype: torch.dtype) -> list[str]:
    found: dict[str, float] = {}
    for geometry, bias, whole, pad in itertools.product(GEOMETRY, (True, False), (True, False), (False, True)):
        outs = 6 if pad else 8
        for kind in (OutputChannelParallelConv2d, InputChannelParallelConv2d):
            output = kind is OutputChannelParallelConv2d
            if pad and not whole:
                continue
            name = f"{kind.__name__} {geometry} bias={bias} whole={whole} pad={pad}"
            sizes = (4, outs, (3, 2)) if output else (outs, 4, (3, 2))
            options = {"gather_output": whole} if output else {"input_is_parallel": not whole}
            shared = {"bias": bias, "dtype": dtype, **geometry}
            layer = make(kind, *sizes, **shared, **options, partition_pad=pad)
            reference = make(nn.Conv2d, *sizes, **shared)
            x_plain = image(sizes[0], dtype).requires_grad_()
            split_input = not output and not whole
            x = (piece(x_plain, 1) if split_input else x_plain).detach().clone().requires_grad_()
            y, expected = layer(x), reference(x_plain)
            part = (lambda t: piece(t, 1)) if output and not whole else (lambda t: t)
            found[name] = error(y, part(expected))
            y.pow(3).sum().backward()
            expected.pow(3).sum().backward()
            found[f"{name} input grad"] = error(x.grad, piece(x_plain.grad, 1) if split_input else x_plain.grad)
            for parameter in ("weight", "bias") if bias else ("weight",):
                theirs = getattr(reference, parameter)
                ours = getattr(layer, parameter)
                found[f"{name} {parameter}"] = error(ours, own_part(layer, parameter, theirs.detach()))
                found[f"{name} {parameter} grad"] = error(ours.grad, own_part(layer, parameter, theirs.grad))
    single = make(OutputChannelParallelConv2d, 4, 8, 3, dtype=dtype)(image(4, dtype)[0])
    found["one image"] = error(single, make(nn.Conv2d, 4, 8, 3, dtype=dtype)(image(4, dtype)[0]))
    return failures(found, LIMITS[dtype])


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float32), (2, torch.float64), (4, torch.float32)], ids=str)
def test_equal_to_plain(tp: int, dtype: torch.dtype):
    for rank, bad in enumerate(run_ranks(all_cases, tp, dtype) if tp > 1 else [all_cases(dtype)]):
        assert not bad, f"rank {rank}: " + "; ".join(bad)


def test_options_that_cannot_be():
    with pytest.raises(ParallelConfigError, match="groups=1"):
        OutputChannelParallelConv2d(4, 4, 3, groups=2)
    with pytest.raises(ParallelConfigError, match="padding_mode must be one of"):
        InputChannelParallelConv2d(4, 4, 3, padding_mode="mirror")
