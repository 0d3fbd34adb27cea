"""The demo's optimizer, and its word about a model that has learnt too little."""

from __future__ import annotations

from functools import partial

import torch

from nxd_infer.cli.demo.optimizer import Float32Muon, orthogonalized
from nxd_infer.cli.demo.small import too_little
from nxd_infer.cli.demo.training import Trained


def test_without_bfloat16_the_optimizer_does_what_pytorchs_does():
    torch.manual_seed(0)
    start, gradients = torch.randn(24, 40), torch.randn(3, 24, 40)
    moved = []
    for shape in (start.shape, start.T.shape):
        for make in (partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"), Float32Muon):
            weight = start.reshape(shape).clone().requires_grad_(True)
            optimizer = make([weight], lr=0.1)
            for gradient in gradients:
                weight.grad = gradient.reshape(shape).clone()
                optimizer.step()
            moved.append((weight - start.reshape(shape)).detach())
    for theirs, ours in zip(moved[::2], moved[1::2], strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()  # bfloat16 has 8 bits
    values = torch.linalg.svdvals(orthogonalized(start))
    assert values.min() > 0.6 and values.max() < 1.3


def test_a_model_that_had_no_time_to_learn_is_told_of():
    def note(loss):
        return too_little(Trained(17, 8.4, loss, 7.0, 800.0), 60)

    assert note(2.3) == ""
    assert "17 steps in 60 s leave a loss of 6.49" in note(6.49) and "--seconds 300" in note(6.49)
