"""Which adapter ``load_lora_from_ckpt`` starts from: by the number of the checkpoint, whole ones only, undamaged."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from nxd_infer.checkpoint.api import save_checkpoint
from nxd_infer.errors import CheckpointError
from nxd_infer.modules.lora import LoraConfig, LoRAModel, load_adapter
from nxd_infer.modules.lora.find import find_adapter


def adapted(value: float, **options: Any) -> LoRAModel:
    torch.manual_seed(0)
    model = LoRAModel(nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"], lora_rank=2, **options))
    if not options:
        with torch.no_grad():
            model.get_parameter("0.lora_B.weight").fill_(value)
    return model


def resumed(root: Path) -> float:
    model = adapted(0.0, load_lora_from_ckpt=True, lora_save_dir=str(root))
    return model.get_parameter("0.lora_B.weight")[0, 0].item()


def saved(root: Path, *values: int) -> None:
    for value in values:
        save_checkpoint(root, f"step_{value}", adapted(value))


def test_the_newest_by_its_number_but_what_a_killed_save_left(tmp_path: Path):
    saved(tmp_path, 1, 2)
    for path in (tmp_path / "step_1").rglob("*"):
        os.utime(path, (1 << 33, 1 << 33))  # copied, or touched, after the others
    assert resumed(tmp_path) == 2
    assert find_adapter(tmp_path, "step_1") == tmp_path / "step_1" / "lora_adapter"
    shutil.copytree(tmp_path / "step_2", tmp_path / ".saving-00000003")
    (tmp_path / ".saving-00000003" / "done").unlink()
    (tmp_path / ".saving-00000003" / "manifest.json").unlink()
    shutil.copytree(tmp_path / "step_2", tmp_path / ".removing-step_0")
    (tmp_path / "step_2" / "done").unlink()
    assert resumed(tmp_path) == 1
    shutil.rmtree(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match="has no adapter"):
        resumed(tmp_path)
    with pytest.raises(CheckpointError, match=r"step_2 .*is incomplete"):
        find_adapter(tmp_path, "step_2")


@pytest.mark.parametrize("file", ["lora_adapter/adapter_model.safetensors", "lora_adapter/adapter_config.json"])
def test_a_damaged_adapter_is_named(tmp_path: Path, file: str):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step_2" / file
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(CheckpointError, match=f"step_2/{file} differs from its checksum"):
        resumed(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"step_2/{file} is missing"):
        resumed(tmp_path)
    save_checkpoint(tmp_path, "without", nn.Linear(2, 2))  # a newer one that has no adapter
    path.write_bytes(data)
    assert resumed(tmp_path) == 2


def test_a_damaged_manifest_of_the_newest(tmp_path: Path):
    saved(tmp_path, 1, 2)
    older, newest = (tmp_path / tag / "manifest.json" for tag in ("step_1", "step_2"))
    older.write_bytes(older.read_bytes()[:-9])
    assert resumed(tmp_path) == 2
    newest.write_bytes(newest.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="differs from its checksum in 'done'"):
        resumed(tmp_path)


def test_two_checkpoints_of_one_number(tmp_path: Path):
    """Of two jobs, say, whose folders were put together: nothing says which is meant."""
    saved(tmp_path, 1, 2)
    saved(tmp_path / "other", 3, 4)
    (tmp_path / "other" / "step_4").rename(tmp_path / "step_4")
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"step_2 and .*step_4 are both checkpoint number 2.*lora_load_tag"):
        resumed(tmp_path)
    assert find_adapter(tmp_path, "step_4") == tmp_path / "step_4" / "lora_adapter"


def test_adapters_that_have_no_number(tmp_path: Path):
    adapted(5.0).save_adapter(tmp_path / "a")
    (tmp_path / "rank_8").mkdir()  # logs of ranks, say
    (tmp_path / "rank_0.log").touch()
    assert resumed(tmp_path) == 5
    adapted(6.0).save_adapter(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"2 adapters.*a, b.*lora_load_tag"):
        resumed(tmp_path)
    assert find_adapter(tmp_path, "b") == tmp_path / "b"
    adapted(7.0).save_adapter(tmp_path)
    assert resumed(tmp_path) == 7


FULL = {
    "lora_alpha": 6.0,
    "lora_dropout": 0.25,
    "bias": "lora_only",
    "use_rslora": True,
    "init_lora_weights": "gaussian",
    "modules_to_save": ["1"],
    "lora_verbose": True,
    "save_lora_base": True,
    "merge_lora": True,
    "merge_sharded_lora": False,
}


@pytest.mark.parametrize("inside", [True, False], ids=["in the adapter's file", "in a file of its own"])
def test_the_whole_configuration_comes_back(tmp_path: Path, inside: bool):
    """``save_lora_config_adapter`` says where it is saved; every option is what it was, wherever that is."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = LoraConfig(target_modules=["0"], lora_rank=2, save_lora_config_adapter=inside, **FULL)
    save_checkpoint(tmp_path, "a", LoRAModel(net, config))
    folder = tmp_path / "a" / "lora_adapter"
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        stored = file.metadata().get("adapter_config")
    assert (stored is not None) == inside
    assert (folder / "adapter_config.json").exists() != inside
    text = stored or (folder / "adapter_config.json").read_text()
    assert json.loads(text)["r"] == 2 and json.loads(text)["peft_type"] == "LORA"
    found = LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path), lora_load_tag="a")
    other = LoRAModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), found)
    wanted = dataclasses.asdict(config) | {
        name: getattr(found, name) for name in ("load_lora_from_ckpt", "lora_save_dir", "lora_load_tag")
    }
    assert dataclasses.asdict(other.lora_config) == wanted
    assert torch.equal(other.get_parameter("0.lora_A.weight"), net[0].get_parameter("lora_A.weight"))
    load_adapter(LoRAModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config), folder)


def test_an_adapter_without_a_configuration_is_named(tmp_path: Path):
    adapted(1.0).save_adapter(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_config.json, and .* has no configuration"):
        resumed(tmp_path)


def test_how_to_save_may_be_given_anew(tmp_path: Path):
    """An adapter that was saved alone is loaded to be merged: what is asked for counts before what the file says."""
    saved(tmp_path, 1)
    model = adapted(0.0, load_lora_from_ckpt=True, lora_save_dir=str(tmp_path), save_lora_base=True, merge_lora=True)
    assert model.lora_config.modules_to_save is None  # as it was
    assert model.lora_config.merge_lora and set(model.state_dict()) == {"0.weight", "0.bias"}


def test_base_weights_that_are_not_loaded_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The trainer loads them; a model that is adapted without it says that it does not."""
    model = adapted(0.0, save_lora_base=True)
    save_checkpoint(tmp_path, "both", model)
    saved(tmp_path, 1)
    adapted(0.0, load_lora_from_ckpt=True, lora_save_dir=str(tmp_path), lora_load_tag="step_1")
    assert not caplog.records
    adapted(0.0, load_lora_from_ckpt=True, lora_save_dir=str(tmp_path), lora_load_tag="both")
    assert "only the adapter" in caplog.text and "load_checkpoint(FOLDER, TAG, model=model)" in caplog.text
