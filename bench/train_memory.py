"""Measure the peak memory of activations in one training step of the benchmarks' Llama, in a separate process.

``python -m bench.train_memory none|full LAYERS HIDDEN LENGTH`` prints one JSON object. Weights and gradients exist
before the step, so the peak of the resident set adds only activations and working memory. Start it with
``MALLOC_MMAP_THRESHOLD_=65536``, so that freed tensors go back to the kernel at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import nxd_infer as nxd
from bench.model import COMMON
from nxd_models.llama.config import LlamaConfig
from nxd_models.llama.model import CausalLM


def status(field: str) -> int:
    """Return bytes: VmRSS is resident now, VmHWM the peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def main(mode: str, layers: int, hidden: int, length: int) -> None:
    sizes = LlamaConfig(
        model_type="llama",
        vocab_size=COMMON["vocab"],
        hidden_size=hidden,
        intermediate_size=hidden * COMMON["intermediate"] // COMMON["hidden"],
        num_layers=layers,
        num_heads=COMMON["heads"],
        num_kv_heads=COMMON["kv_heads"],
        head_dim=hidden // COMMON["heads"],
        max_position=COMMON["max_len"],
    )
    config = nxd.neuronx_distributed_config(activation_checkpoint_config=None if mode == "none" else mode)
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(config, CausalLM, sizes)
    for param in model.parameters():
        param.grad = torch.zeros_like(param).fill_(0.0)
    ids = torch.randint(0, sizes.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    model.run_train(input_ids=ids[:, :8], labels=ids[:, :8])  # one-time allocations of libraries
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    loss = model.run_train(input_ids=ids, labels=ids)
    print(json.dumps({"bytes": status("VmHWM") - before, "held": before, "loss": float(loss)}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
