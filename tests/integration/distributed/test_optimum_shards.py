"""Shards of Optimum Neuron, as its releases laid them out, become whole weights again."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxd_infer.checkpoint import consolidate_checkpoint
from nxd_infer.errors import CheckpointError, ModelConfigError
from tests.support.checkpoint.reference import write as write_file
from tests.support.distributed.memory import MIB, growth
from tests.support.ranks import run_ranks

DEGREE, HEADS, KV, MULTIPLIER, DIM, WIDTH = 4, 8, 2, 2, 3, 5
EMBEDDING = "model.embed_tokens.weight"
Q, K, V, O = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo")
STORED = {name: f"model.layers.0.self_attn.qkv_proj.weight_{letter}" for name, letter in ((Q, "q"), (K, "k"), (V, "v"))}
HEADS_OF_RANKS = [(0, 1), (4, 5), (2, 3), (6, 7)]
"""Keys are [k0, k1, k0, k1], so ranks 0 and 2 share the query heads 0 to 3, which go with k0."""


def weights(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
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


def write(folder: Path, kind: str, *tables: dict[str, Any], form: str = "plain") -> Path:
    """Write ``shards`` with a pipeline stage for each table: of a layer, the first with the embedding and a norm."""
    shards = folder / "shards"
    (shards / "model").mkdir(parents=True)
    for name in ("checkpoint", "done"):
        (shards / name).write_text("1")
    for stage, content in enumerate(tables):
        for rank in range(DEGREE):
            state = of_stage(shard(weights(stage), rank), stage)
            file = shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            write_file(file, state, form == "xser")
        if kind == "json":
            (shards / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(content))
        else:
            torch.save(content, shards / f"mp_metadata_pp_rank_{stage}.pt")
    (folder / "config.json").write_text("{}")
    return folder


def of_stage(named: dict[str, Any], stage: int) -> dict[str, Any]:
    """The layer 0 becomes that of the stage; what is of no layer is on stage 0."""
    return {
        name.replace("layers.0.", f"layers.{stage}."): value
        for name, value in named.items()
        if not stage or "layers" in name
    }


def table_of_stage(stage: int, **more: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(table()).replace("layers.0.", f"layers.{stage}.")), **more}


def require_whole(folder: Path, stages: int = 1) -> None:
    found = load_file(folder / "model.safetensors")
    wanted = {name: value for stage in range(stages) for name, value in of_stage(weights(stage), stage).items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("kind", "start", "form"), [("json", "", "xser"), ("json", "shards", "plain"), ("pt", "", "plain")]
)
def test_shards_become_whole_weights(tmp_path: Path, kind: str, start: str, form: str):
    folder = write(tmp_path / "in", kind, table(), form=form)
    consolidate_checkpoint(folder / start, tmp_path / "out")
    require_whole(tmp_path / "out")
    assert (tmp_path / "out/config.json").exists()


def test_weights_beside_their_configuration_are_plain(tmp_path: Path):
    folder = write(tmp_path / "in", "json", table())
    for method in ("hqq", "fp8"):
        (folder / "config.json").write_text(json.dumps({"a": 1, "quantization_config": {"quant_method": method}}))
        if method == "hqq":
            with pytest.raises(ModelConfigError, match="quant_method = 'hqq'"):
                consolidate_checkpoint(folder, folder)
            assert not (folder / "model.safetensors").exists()
    consolidate_checkpoint(folder, folder)
    assert json.loads((folder / "config.json").read_text()) == {"a": 1}
    require_whole(folder)


def test_each_pipeline_stage_is_read_by_its_own_table(tmp_path: Path):
    """Eleven, so that their order is that of numbers. Newer tables have an empty list of transformations."""
    more = {"model_weight_transformation_specs": []}
    write(tmp_path / "in", "json", *(table_of_stage(stage, **more) for stage in range(11)))
    consolidate_checkpoint(tmp_path / "in", tmp_path / "out")
    require_whole(tmp_path / "out", 11)
    (tmp_path / "in/shards/mp_metadata_pp_rank_1.json").unlink()
    with pytest.raises(CheckpointError, match=re.escape("mp_metadata_pp_rank_1.json")):
        consolidate_checkpoint(tmp_path / "in", tmp_path / "again")


FIRST, SECOND = (f"base_model.model.{Q.removesuffix('weight')}lora_{which}.default.weight" for which in "AB")


def test_an_adapter_is_consolidated_under_its_names(tmp_path: Path):
    """It is alone in a folder of its own, and its tensors are split as the table says."""
    second, shards = torch.randn(HEADS * DIM, 2), tmp_path / "in/adapter_shards"
    for rank in range(DEGREE):
        state = {FIRST: torch.ones(2, WIDTH), SECOND: second.chunk(DEGREE)[rank].clone()}
        write_file(shards / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt", state, True)
    content = {"sharded_metadata": {FIRST: {"kind": "tied"}, SECOND: {"kind": "sharded", "partition_dim": 0}}}
    (shards / "mp_metadata_pp_rank_0.json").write_text(json.dumps(content))
    for name in ("checkpoint", "done"):
        (shards / name).write_text("1")
    for start in (shards, shards.parent):
        out = tmp_path / start.name
        assert "only an adapter" in consolidate_checkpoint(start, out).notes[0]
        found = load_file(out / "model.safetensors")
        assert found.keys() == {FIRST, SECOND} and torch.equal(found[SECOND], second)
    (shards.parent / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=re.escape("adapter_config.default.json")):
        consolidate_checkpoint(shards.parent, tmp_path / "out")
    assert not (tmp_path / "out").exists()


COUNT, ROWS, COLUMNS = 6, 2048, 1024
LARGE = ROWS * COLUMNS * 4
"""Bytes of each of the tensors."""


def consolidated(folder: Path) -> int:
    """Bytes by which memory grew while a large checkpoint was consolidated."""
    consolidate_checkpoint(folder / "small", folder / "small/out")  # imports
    return growth(functools.partial(consolidate_checkpoint, folder / "large", folder / "out"))[1]


@pytest.mark.parametrize("form", ["plain", "xser"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, form: str):
    write(tmp_path / "small", "json", table(), form=form)
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(COUNT)]
    sharded = {name: {"kind": "sharded", "partition_dim": number % 2} for number, name in enumerate(names)}
    model = tmp_path / "large/shards/model"
    for rank in range(2):
        shapes = {
            name: (ROWS, COLUMNS // 2) if sharded[name]["partition_dim"] else (ROWS // 2, COLUMNS) for name in names
        }
        state = {name: torch.full(shape, float(rank)) for name, shape in shapes.items()}
        write_file(model / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt", state, form == "xser")
    (model.parent / "mp_metadata_pp_rank_0.json").write_text(json.dumps({"sharded_metadata": sharded}))
    for name in ("checkpoint", "done"):
        (model.parent / name).write_text("1")
    (grown,) = run_ranks(consolidated, 1, tmp_path)
    assert LARGE * 0.9 < grown < LARGE + 4 * MIB, (LARGE / MIB, grown / MIB)
    out = load_file(tmp_path / "out/model.safetensors")
    for number, name in enumerate(names):
        assert [float(part.mean()) for part in out[name].chunk(2, number % 2)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (table(kv_size_multiplier=4), "one key/value head a rank"),
        (table(num_attention_heads="many"), "damaged"),
        ({**table(), "model_weight_transformation_specs": [["FusedLinearsSpec", {}]]}, "specs (FusedLinearsSpec)"),
        ({"sharded_metadata": {"model.norm.weight": {"kind": "sharded", "partition_dim": 7}}}, "dimension 7"),
        ({"sharded_metadata": {"model.norm.weight": {"kind": "torn"}}}, "torn"),
        ({}, "no sharded_metadata"),
        ({"sharded_metadata": print}, "was refused"),  # code to run
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, content: dict[str, Any], reason: str):
    kind = "pt" if reason == "was refused" else "json"
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        consolidate_checkpoint(write(tmp_path, kind, content), tmp_path / "out")
