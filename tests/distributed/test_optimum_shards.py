"""Shards of Optimum Neuron, as its releases laid them out, become whole weights again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxd_infer.checkpoint import consolidate_checkpoint
from nxd_infer.errors import CheckpointError

DEGREE, HEADS, KV, MULTIPLIER, DIM, WIDTH = 4, 8, 2, 2, 3, 5
EMBEDDING = "model.embed_tokens.weight"
Q, K, V, O = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo")
STORED = {name: f"model.layers.0.self_attn.qkv_proj.weight_{letter}" for name, letter in ((Q, "q"), (K, "k"), (V, "v"))}
HEADS_OF_RANKS = [(0, 1), (4, 5), (2, 3), (6, 7)]
"""Keys are [k0, k1, k0, k1], so ranks 0 and 2 share the query heads 0 to 3, which go with k0."""


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        Q: torch.randn(HEADS * DIM, WIDTH),
        K: torch.randn(KV * DIM, WIDTH),
        V: torch.randn(KV * DIM, WIDTH),
        O: torch.randn(WIDTH, HEADS * DIM),
        "model.embed_tokens.weight": torch.randn(8, WIDTH),
        "model.norm.weight": torch.randn(WIDTH),
    }


def shard(whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    heads = [whole[Q][h * DIM : (h + 1) * DIM] for h in HEADS_OF_RANKS[rank]]
    columns = [whole[O][:, h * DIM : (h + 1) * DIM] for h in HEADS_OF_RANKS[rank]]
    return {
        STORED[Q]: torch.cat(heads),
        **{STORED[name]: torch.cat([whole[name]] * MULTIPLIER).chunk(DEGREE)[rank].clone() for name in (K, V)},
        O: torch.cat(columns, 1),
        "model.embed_tokens.weight": whole["model.embed_tokens.weight"].chunk(DEGREE)[rank].clone(),
        "model.norm.weight": whole["model.norm.weight"],
    }


def table(**changes: Any) -> dict[str, Any]:
    sharded = {name: {"kind": "sharded", "partition_dim": 0} for name in (*STORED.values(), EMBEDDING)}
    sharded[O] = {"kind": "sharded", "partition_dim": 1}
    sharded["model.norm.weight"] = {"kind": "tied", "partition_dim": None}
    heads = {
        "original_names_to_gqa_qkv_names": STORED,
        "output_projections_names": [O],
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "kv_size_multiplier": MULTIPLIER,
    }
    return {"sharded_metadata": sharded, "gqa_qkv_metadata": {**heads, **changes}}


def write(folder: Path, kind: str, content: dict[str, Any]) -> Path:
    shards = folder / "shards"
    (shards / "model").mkdir(parents=True)
    for name in ("checkpoint", "done"):
        (shards / name).write_text("1")
    for rank in range(DEGREE):
        torch.save(shard(weights(), rank), shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    if kind == "json":
        (shards / "mp_metadata_pp_rank_0.json").write_text(json.dumps(content))
    else:
        torch.save(content, shards / "mp_metadata_pp_rank_0.pt")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", ["json", "pt"])
@pytest.mark.parametrize("start", ["", "shards"])
def test_shards_become_whole_weights(tmp_path: Path, kind: str, start: str):
    folder = write(tmp_path / "in", kind, table())
    consolidate_checkpoint(folder / start, tmp_path / "out")
    found, wanted = load_file(tmp_path / "out/model.safetensors"), weights()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (table(kv_size_multiplier=4), "one key/value head a rank"),
        (table(num_attention_heads="many"), "damaged"),
        ({**table(), "model_weight_transformation_specs": [1]}, "model_weight_transformation_specs"),
        ({"sharded_metadata": {"model.norm.weight": {"kind": "sharded", "partition_dim": 7}}}, "dimension 7"),
        ({"sharded_metadata": {"model.norm.weight": {"kind": "torn"}}}, "torn"),
        ({}, "no sharded_metadata"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, content: dict[str, Any], reason: str):
    folder = write(tmp_path, "json", content)
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        consolidate_checkpoint(folder, tmp_path / "out")


def test_a_table_that_would_run_code_is_refused(tmp_path: Path):
    folder = write(tmp_path, "pt", {"sharded_metadata": print})
    with pytest.raises(CheckpointError, match="was refused"):
        consolidate_checkpoint(folder, tmp_path / "out")
