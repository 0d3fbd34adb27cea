"""The exponential that the sampler draws with."""

from __future__ import annotations

import torch

from nxd_infer.ops.sampling import exp_negative


def test_the_exponential_is_as_exact_as_it_says():
    x = -torch.cat([torch.linspace(0, 87, 400_001), torch.rand(100_000, generator=torch.Generator().manual_seed(1))])
    x = x[x > -87]
    error = (exp_negative(x).double() / x.double().exp() - 1).abs().max().item()
    assert error < 1.2e-7
    assert exp_negative(torch.tensor([0.0, -87.0, -float("inf")])).tolist() == [1.0, 0.0, 0.0]
