"""How fast a step is said to be, on several ranks: it counts the tokens of all of them."""

from __future__ import annotations

import json

from nxd_infer.context import make_context, use_context
from nxd_server.text.tokenizer import Tokenizer
from tests.support.ranks import run_ranks
from tests.support.recipes.jobs import sizes_on_a_rank, write, write_pairs
from tests.support.tiny_models import write_tiny

SFT = "model_alignment_strategy: {sft: {}}\n"


def test_a_step_counts_the_tokens_of_all_ranks(tmp_path):
    """Rows of several lengths, which ranks and microbatches share in any way."""
    write_tiny("llama", tmp_path / "model")
    write_pairs(tmp_path, 12)
    in_order = ["data.shuffle=false"]
    with use_context(make_context()):
        alone = sizes_on_a_rank(str(write(tmp_path, 1, SFT)), in_order, 3)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_dir(tmp_path / "model")
    lengths = [len(tokenizer.encode(row["prompt"] + row["completion"])) + 1 for row in rows]  # and its end
    steps = [lengths[at : at + 4] for at in range(0, 12, 4)]
    assert alone == [(sum(step), sum(size**2 for size in step)) for step in steps]
    file = str(write(tmp_path, 2, SFT))
    for tp, pp in ((1, 1), (1, 2)):
        sizes = {"tensor": tp, "pipeline": pp}
        degrees = [f"distributed_strategy.{name}_model_parallel_size={size}" for name, size in sizes.items()]
        assert run_ranks(sizes_on_a_rank, 2, file, [*degrees, *in_order], 3, tp=tp, pp=pp) == [alone, alone]
