"""The checkpoint converter of neuronx_distributed's scripts: each rank's files compared with slices made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nxd_infer.checkpoint.api import load_checkpoint
from nxd_infer.checkpoint.neuronx.converter import CheckpointConverterBase
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import CheckpointError, ModelConfigError
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from tests.support.checkpoint.reference import write

HEADS, KV_HEADS, DIM, HIDDEN, INNER, LAYERS = 8, 2, 2, 6, 8, 3


class Converter(CheckpointConverterBase):
    """As scripts for Llama write it: gate and up are one weight."""

    def pre_process_full_state_before_tp_conversion(self, state_dict: dict[str, Tensor], args: Any) -> dict:
        for name in [name for name in state_dict if "gate_proj" in name]:
            up = state_dict.pop(name.replace("gate_proj", "up_proj"))
            state_dict[name.replace("gate_proj", "gate_up_proj")] = torch.cat([state_dict.pop(name), up])
        return state_dict

    def post_process_full_state_after_tp_conversion(self, state_dict: dict[str, Tensor], args: Any) -> dict:
        for name in [name for name in state_dict if "gate_up_proj" in name]:
            gate, up = state_dict.pop(name).chunk(2)
            state_dict[name.replace("gate_up_proj", "gate_proj")] = gate
            state_dict[name.replace("gate_up_proj", "up_proj")] = up
        return state_dict


def convert(*options: object) -> None:
    parser, _ = Converter().get_arg_parser()
    Converter().run(parser.parse_args([str(option) for option in options]))


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["convert.py", "--input_dir", "in", "--output_dir", "out", "--more", "1"])


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    torch.manual_seed(0)
    state = {"model.embed_tokens.weight": torch.randn(8, HIDDEN)}
    shapes = {"self_attn.q_proj": (HEADS * DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * DIM)}
    shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (KV_HEADS * DIM, HIDDEN))
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    for layer in range(LAYERS):
        state |= {f"model.layers.{layer}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
        state[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(HIDDEN)
    return {**state, "model.norm.weight": torch.randn(HIDDEN), "lm_head.weight": torch.randn(8, HIDDEN)}


@pytest.fixture
def source(whole: dict[str, Tensor], tmp_path: Path) -> Path:
    torch.save(whole, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}))
    return tmp_path / "pytorch_model.bin"


def heads(weight: Tensor, chosen: list[int]) -> Tensor:
    return torch.cat([weight[head * DIM : (head + 1) * DIM] for head in chosen])


# Of rank 1 of 4: its query heads, and its key/value head; trn1 has whole blocks of key/value heads after one another.
PLACES = {"trn1": ([4, 5], 1), "trn2": ([2, 3], 0)}


@pytest.mark.parametrize("backend", PLACES)
def test_replicated_heads_are_where_the_hardware_has_them(backend: str, source: Path, whole: dict, tmp_path: Path):
    options = ["--tp_size", 4, "--kv_size_multiplier", 2, "--qkv_linear", "True", "--hw_backend", backend]
    convert("--input_dir", source, "--output_dir", tmp_path / "t", "--convert_from_full_state", *options)
    rank = torch.load(tmp_path / "t/model/dp_rank_00_tp_rank_01_pp_rank_00.pt", weights_only=True)
    queries, key = PLACES[backend]
    attention = "model.layers.2.self_attn"
    q, k, o = (whole[f"{attention}.{name}_proj.weight"] for name in "qko")
    assert torch.equal(rank[f"{attention}.qkv_proj.weight_q"], heads(q, queries))
    assert torch.equal(rank[f"{attention}.qkv_proj.weight_k"], heads(k, [key]))
    assert torch.equal(rank[f"{attention}.o_proj.weight"], heads(o.T, queries).T)
    (tmp_path / "t/config.json").write_bytes((tmp_path / "config.json").read_bytes())
    back = tmp_path / "back.safetensors"
    convert("--input_dir", tmp_path / "t", "--output_dir", back, "--convert_to_full_state", *options)
    found = weight_source(back)
    assert set(found.keys()) == whole.keys()
    assert all(torch.equal(found.read(name), tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("mode", ["", "qkv_linear", "qkv_linear fuse_qkv", "coalesce_qkv"])
def test_each_rank_has_its_part_and_the_parts_are_the_state(mode: str, source: Path, whole: dict, tmp_path: Path):
    """On two stages of two ranks, from safetensors, and back from the folder ``model`` or files of save_xser."""
    save_file(whole, tmp_path / "model.safetensors")
    options = ["--tp_size", 2, "--pp_size", 2, "--n_layers", LAYERS, "--model_key", "model"]
    options += [text for name in mode.split() for text in (f"--{name}", "True")]
    given = ["--input_dir", tmp_path / "model.safetensors", "--output_dir", tmp_path / "t"]
    convert(*given, "--convert_from_full_state", "--save_xser", "True", *options)
    files = {path.name: torch.load(path, weights_only=True) for path in (tmp_path / "t/model").iterdir()}
    layer = "model.layers.1"
    rank = files["dp_rank_00_tp_rank_01_pp_rank_00.pt"]
    parts = [whole[f"{layer}.mlp.{name}_proj.weight"].chunk(2)[1] for name in ("gate", "up")]
    assert torch.equal(rank[f"{layer}.mlp.gate_up_proj.weight"], torch.cat(parts))
    assert torch.equal(rank[f"{layer}.mlp.down_proj.weight"], whole[f"{layer}.mlp.down_proj.weight"].chunk(2, 1)[1])
    assert torch.equal(rank[f"{layer}.input_layernorm.weight"], whole[f"{layer}.input_layernorm.weight"])
    q, k, v = (whole[f"{layer}.self_attn.{name}_proj.weight"].chunk(2)[1] for name in "qkv")
    attention = {name.rpartition("self_attn.")[2]: rank[name] for name in rank if f"{layer}.self_attn" in name}
    expected = {
        "": {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v},
        "qkv_linear": {"qkv_proj.weight_q": q, "qkv_proj.weight_k": k, "qkv_proj.weight_v": v},
        "qkv_linear fuse_qkv": {"qkv_proj.weight_qkv": torch.cat([q, k, v])},
        "coalesce_qkv": {"qkv_proj.weight": torch.cat([q, k, v])},
    }[mode]
    assert attention.keys() == {*expected, "o_proj.weight"}
    assert all(torch.equal(attention[name], tensor) for name, tensor in expected.items())
    last = files["dp_rank_00_tp_rank_00_pp_rank_01.pt"]
    assert {"model.layers.2.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"} < last.keys()
    assert "model.embed_tokens.weight" in rank and f"{layer}.mlp.down_proj.weight" not in last

    for name, state in files.items():
        write(tmp_path / "xser" / name, state, True)
    for folder, out in (("t/model", "out.bin"), ("t", "out"), ("xser", "more.pt")):
        given = ["--input_dir", tmp_path / folder, "--output_dir", tmp_path / out, "--load_xser", "True"]
        convert(*given, "--convert_to_full_state", *options, "--config", tmp_path)
        path = tmp_path / out
        found = torch.load(path / "checkpoint.pt" if path.is_dir() else path, weights_only=True)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_a_folder_without_marks_is_loaded_and_inspected_by_rules(source: Path, whole: dict, tmp_path: Path):
    """Older converters left none of the trainer's files beside ``model/``."""
    options = ["--tp_size", 1, "--qkv_linear", "1"]
    convert("--input_dir", source, "--output_dir", tmp_path / "a/pretrained", "--convert_from_full_state", *options)
    for mark in ("checkpoint", "done"):
        (tmp_path / "a/pretrained" / mark).unlink()
    attention = GQAQKVColumnParallelLinear(HIDDEN, [HEADS * DIM, KV_HEADS * DIM], bias=False, fuse_qkv=True)
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList()})})
    model["model"]["layers"].append(  # pyright: ignore[reportIndexIssue]
        torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict({"qkv_proj": attention})})
    )
    load_checkpoint(tmp_path / "a", "pretrained", model=model, strict=False)
    parts = [whole[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(attention.state_dict()["weight_qkv"], torch.cat(parts))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ([], CheckpointError, "either --convert_from_full_state or --convert_to_full_state"),
        (["--convert_from_full_state", "--ep_size", 2], CheckpointError, "--ep_size: only unsharded states"),
        (["--convert_from_xser"], CheckpointError, "--convert_from_xser: only"),
        (["--convert_from_full_state", "--n_layers", 4], CheckpointError, "--n_layers is 4, and the model has 3"),
        (["--convert_from_full_state", "--pp_size", 4], CheckpointError, "--pp_size 4 is more than the model's 3"),
        (
            ["--convert_from_full_state", "--qkv_linear", "1", "--kv_size_multiplier", 3, "--tp_size", 3],
            ModelConfigError,
            "8 query heads .16 features. and 2 key/value heads .4 features. cannot be placed",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(options: list, error: type, text: str, source: Path, tmp_path: Path):
    with pytest.raises(error, match=text):
        convert("--input_dir", source, "--output_dir", tmp_path / "t", *options)
