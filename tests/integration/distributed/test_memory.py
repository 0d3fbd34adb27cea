"""A lazily loaded model never takes more than its shard and one tensor of anonymous memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import nxd_infer as nxd
from nxd_infer.distributed.parallelizer import ParallelizersManager
from tests.support.distributed.memory import MIB, growth
from tests.support.ranks import run_ranks

transformers = pytest.importorskip("transformers")
SLACK = 12 * MIB
"""For what reading takes at a time (8 MiB), and Python's own."""


def measured(folder: Path) -> tuple[int, int, int]:
    """Bytes of the shard, of the largest tensor of the whole model, and of the growth while it was loaded."""

    def load() -> tuple[int, int]:
        with nxd.distributed.lazy_load_for_parallelism(tensor_parallel_size=2):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        largest = max(weight.numel() for weight in model.parameters()) * 4
        model = ParallelizersManager.parallelizer_for_model(model).parallelize(model)
        return sum(weight.numel() for weight in model.parameters()) * 4, largest

    (shard, largest), grown = growth(load)
    return shard, largest, grown


def warmed(folder: Path) -> tuple[int, int, int]:
    measured(folder / "small")  # imports
    return measured(folder / "large")


def test_a_rank_holds_its_shard_and_one_tensor(tmp_path: Path):
    sizes = {"small": (64, 2, 100), "large": (512, 8, 8000)}
    for name, (width, layers, vocabulary) in sizes.items():
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 3,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / name, max_shard_size="40MB")
    whole = sum(weight.numel() for weight in model.parameters()) * 4
    for shard, largest, grown in run_ranks(warmed, 2, tmp_path, comm_timeout=120):
        assert shard < whole * 0.51
        assert shard * 0.9 < grown <= shard + largest + SLACK, (whole / MIB, shard / MIB, largest / MIB, grown / MIB)
