"""How fast a step is said to be: its tokens without padding, and the operations that the model needs for them."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nxd_infer.context import make_context, use_context
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.recipes.batches import sizes_of
from nxd_infer.recipes.plan import model_flops
from nxd_infer.recipes.speed import Speed, Step, count_parameters, matmul_peak
from nxd_models import registry
from tests.support.tiny_models import VOCAB_SIZE, write_tiny


def test_padding_does_not_count():
    ids = torch.zeros(2, 6, dtype=torch.int64)
    packed = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0]])
    assert sizes_of({"input_ids": ids, "attention_mask": packed}).tolist() == [7, 4 + 9 + 4]
    assert sizes_of({"input_ids": ids}).tolist() == [12, 2 * 36]
    pairs = {"input_ids": ids[None], "attention_mask": (packed != 0).long()[None]}  # [rows, 2, S]
    assert sizes_of(pairs).tolist() == [7, 25 + 4]


def counted(model, ids) -> int:
    """The operations of a forward and a backward pass, as torch counts them."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it counts no other kernel's
        model(ids, labels=ids)[0].backward()
    return counter.get_total_flops()


def test_the_operations_are_those_that_torch_counts(tmp_path):
    folder = write_tiny("llama", tmp_path, tie_word_embeddings=True, num_hidden_layers=8)
    raw = json.loads((folder / "config.json").read_text())
    ids = torch.randint(5, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(0))
    with use_context(make_context()):
        model = registry.load_model(folder, "generate", torch.float32)
        parameters, trained = count_parameters(model)
        assert parameters == trained == sum(param.numel() for param in model.parameters())
        squares = 2 * 24**2
        whole = 2 * squares  # torch counts attention as if it were not causal
        assert counted(model, ids) == pytest.approx(model_flops(raw, parameters, trained, 48, whole), rel=0.01)
        adapted = LoRAModel(model, LoraConfig(enable_lora=True, lora_rank=4, target_modules=["q_proj", "up_proj"]))
        all_, few = count_parameters(adapted)
        assert few == sum(param.numel() for param in adapted.parameters() if param.requires_grad) < 0.2 * all_
        needed = model_flops(raw, all_, few, 48, whole)
        assert counted(adapted, ids) == pytest.approx(needed, rel=0.03)  # nothing flows below the first
        speed = Speed(model, raw, torch.float32, world=2)
    step = Step(torch.zeros(()), 1e-3, 0.5, torch.tensor(48.0), torch.tensor(float(squares)))
    needed = model_flops(raw, *count_parameters(model), 48, squares)
    assert speed.tokens_per_second(step) == 96
    assert speed.mfu(step) == pytest.approx(needed / 0.5 / (2 * matmul_peak(torch.float32)))
