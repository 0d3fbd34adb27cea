"""The training benchmark: everybody computes one loss, and the rows say what the readings say."""

from __future__ import annotations

import pytest
import torch

from bench import train
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


def test_rows_compare_round_by_round():
    seconds = {
        "one process": [4.0, 6.0],
        "tp 2": [2.0, 2.0],
        "DTensor": [2.5, 2.0],
        "tp 2, sequence parallel": [2.0, 3.0],
    }
    seconds |= {"ZeRO-1": [1.0, 1.0], "FSDP2": [2.0, 2.0], "DDP": [1.0, 0.8]}
    figures = {
        "seconds": seconds,
        "save": {"sync": [1.0, 1.0], "async": [0.2, 0.2]},
        "state": {"most": 51, "whole": 100, "padding": 2},
        "memory": {"none": {"bytes": 100}, "full": {"bytes": 60}},
    }
    rows = {verdict.row: (verdict.measured.median, verdict.result) for verdict in train._verdicts(figures)}
    assert rows == {
        "tp 2 step over DTensor's": (0.9, "aim"),
        "tp 2 against one process of one thread": (2.5, "aim"),
        "sequence parallel over plain tp 2": (1.25, "short"),
        "ZeRO-1 step over FSDP2's": (0.5, "aim"),
        "ZeRO-1 step over DDP's": (1.125, "must"),
        "ZeRO-1 state beyond 1/dp": (1.0, "aim"),
        "async save blocks, over sync": (0.2, "aim"),
        "activation memory, full over none": (0.6, "short"),
    }
