"""The training benchmark: everybody computes one loss."""

from __future__ import annotations

import pytest
import torch

from bench.plain_llama import PlainLlama
from bench.train_ranks import QUICK_SIZES, decoder_config
from nxd_models.llama.model import CausalLM


def test_the_plain_llama_is_the_model():
    config = decoder_config(QUICK_SIZES)
    torch.manual_seed(0)
    plain, ours = PlainLlama(config).double(), CausalLM(config, torch.float64)
    ours.load_state_dict(plain.state_dict())
    ids = torch.randint(0, config.vocab_size, (2, 24))
    expected, _ = ours(ids, labels=ids)
    assert plain(ids).item() == pytest.approx(expected.item(), rel=1e-6)  # rotary angles are float32 in both
    for model in (plain, ours):
        (model(ids) if model is plain else model(ids, labels=ids)[0]).backward()
    grads = dict(ours.named_parameters())
    for name, param in plain.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(param.grad, grads[name].grad, rtol=1e-5, atol=1e-9)
