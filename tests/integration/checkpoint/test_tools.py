"""``nxd-infer ckpt``: what a job of two ranks saved, taken out without processes; transformers reads it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.checkpoint import consolidate_checkpoint
from nxd_infer.checkpoint.api import save_checkpoint
from nxd_infer.checkpoint.archive import adapter_of
from nxd_infer.layout import DictSource
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_models import registry
from tests.support.e2e.command import nxd_infer_here, refused
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny
from tests.support.trainer.jobs import training
from tests.support.trainer.models import tokens

IDS = tokens()["input_ids"]


def trained(model_dir: str, root: str) -> Tensor:
    """Train two steps at tp 2, save, and return the whole logits."""
    model, optimizer = training(
        partial(registry.build, model_dir, dtype=torch.float32), optimizer_config={"zero_one_enabled": True}
    )
    for tag in ("first", "second"):
        model.run_train(input_ids=IDS, labels=IDS)
        optimizer.step()
        optimizer.zero_grad()
        save_checkpoint(root, tag, model, optimizer)
    with torch.no_grad():
        return model(input_ids=IDS)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_exported_weights(tmp_path: Path, capsys, monkeypatch, family: str):
    """With a vocabulary and widths that are padded at tp 2; qwen2 is tied and has biases."""
    transformers = pytest.importorskip("transformers")
    config = write_tiny(family, tmp_path / "model", intermediate_size=45, vocab_size=289)
    root, out = tmp_path / "ckpts", tmp_path / "exported"
    logits, _ = run_ranks(trained, 2, str(config), str(root), tp=2)

    done = nxd_infer_here(capsys, monkeypatch, "ckpt", "export-hf", root, "--config", config, "--out", out)
    assert done.status == 0, done.err
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    assert (out / "tokenizer.json").is_file()

    arguments = ("ckpt", "consolidate", root, "--tag", "first", "--dtype", "bfloat16", "--out", tmp_path / "half")
    assert nxd_infer_here(capsys, monkeypatch, *arguments).status == 0
    half, whole = load_file(tmp_path / "half" / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: value.shape for name, value in half.items()} == {name: value.shape for name, value in whole.items()}
    assert {value.dtype for value in half.values()} == {torch.bfloat16}

    listed = nxd_infer_here(capsys, monkeypatch, "ckpt", "inspect", root)
    assert listed.status == 0 and "first" in listed.out and "second" in listed.out and "tp 2" in listed.out
    shown = nxd_infer_here(capsys, monkeypatch, "ckpt", "inspect", root, "--tag", "second")
    assert f"model: {len(whole)} tensors" in shown.out and "[289, 32]" in shown.out


@pytest.fixture
def run(capsys, monkeypatch):
    return partial(nxd_infer_here, capsys, monkeypatch, "ckpt")


def adapted(config: Path, root: Path, **options: Any) -> Path:
    model = registry.build(config, dtype=torch.float32)
    save_checkpoint(root, "a", LoRAModel(model, LoraConfig(lora_rank=2, target_modules=["q_proj"], **options)))
    return root


def test_an_adapter_is_no_model(tmp_path: Path, run):
    """Transformers would take every weight that is missing at random, and pass over factors it does not know."""
    config, out = write_tiny("llama", tmp_path / "model"), tmp_path / "out"
    alone = adapted(config, tmp_path / "alone")
    done = run("export-hf", alone, "--config", config, "--out", out)
    refused(done, "holds only a LoRA adapter", "a/lora_adapter with --lora-slots", "merge_lora=True")
    beside = adapted(config, tmp_path / "beside", save_lora_base=True)
    done = run("export-hf", beside, "--config", config, "--out", out)
    refused(done, "a LoRA adapter beside the weights", "save_lora_base=True, merge_lora=True")
    assert not out.exists()

    done = run("consolidate", alone, "--out", tmp_path / "adapter")
    assert done.status == 0 and "only an adapter" in done.out
    done = run("consolidate", beside, "--out", tmp_path / "both")
    assert done.status == 0 and "only an adapter" not in done.out and "unmerged" in done.out
    shutil.copy(config / "config.json", beside)
    done = run("consolidate", beside, "--out", tmp_path / "directory")
    assert done.status == 0 and "unmerged" in done.out

    shutil.copyfile(config / "config.json", beside / "config.json")
    done = run("consolidate", beside, "--out", beside)  # where its configuration is already
    assert done.status == 0 and "unmerged" in done.out and (beside / "model.safetensors").is_file(), done.err

    merged = adapted(config, tmp_path / "merged", save_lora_base=True, merge_lora=True)
    done = run("export-hf", merged, "--config", config, "--out", out)
    assert done.status == 0 and "note" not in done.out, done.err
    assert load_file(out / "model.safetensors").keys() == load_file(config / "model.safetensors").keys()


def test_an_adapter_of_a_joint_layer_is_none_of_pefts(tmp_path: Path):
    """Its factors have the names of q, k and v, as those of PEFT have their adapter's."""
    qkv = GQAQKVColumnParallelLinear(4, [4, 2], bias=False, gather_output=False)
    model = LoRAModel(nn.ModuleDict({"qkv": qkv}), {"lora_rank": 2, "target_modules": ["qkv"], "save_lora_base": True})
    save_checkpoint(tmp_path, "a", model)
    (tmp_path / "config.json").write_text("{}")
    done = consolidate_checkpoint(tmp_path, tmp_path / "out")
    assert "unmerged adapter: qkv.lora_A.k.weight" in done.notes[0]
    assert {"qkv.lora_A.q.weight", "qkv.lora_B.v.weight"} <= load_file(done.weights).keys()


@pytest.mark.parametrize(
    ("factor", "base"),
    [("h.q.lora_A.weight", "h.q.weight"), ("h.qkv.lora_A.q.weight", "h.q_proj.weight"), ("qkv.lora_B.v.weight", "q")],
)
def test_whether_an_adapter_is_alone(factor: str, base: str):
    """A joint layer's base weights are those of q, k and v, which may lie beside it."""
    one, trained = torch.zeros(1), {"head.weight": torch.zeros(1)} if factor.startswith("h.") else {}
    assert adapter_of(DictSource({factor: one, **trained})) == ([factor], True)
    assert adapter_of(DictSource({factor: one, base: one})) == ([factor], False)
    assert adapter_of(DictSource({base: one})) == ([], False)


def test_an_export_is_of_the_model_of_its_configuration(tmp_path: Path, run):
    config = write_tiny("llama", tmp_path / "model")
    save_checkpoint(tmp_path / "ckpts", "a", registry.build(config))
    other = write_tiny("llama", tmp_path / "other", num_hidden_layers=3)
    done = run("export-hf", tmp_path / "ckpts", "--config", other, "--out", tmp_path / "out")
    refused(done, "do not belong to this model", "missing: model.layers.2.")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there(tmp_path: Path, run):
    done = run("inspect", tmp_path / "nope")
    refused(done, "nope does not exist")
    assert "has_checkpoint" not in done.err
    refused(run("diff", tmp_path / "nope", tmp_path), "nope does not exist")


def test_weights_that_are_there_are_kept(tmp_path: Path, run):
    save_checkpoint(tmp_path / "ckpts", "a", torch.nn.Linear(2, 2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("mine")
    refused(run("consolidate", tmp_path / "ckpts", "--out", tmp_path / "out"), "already exists", "choose another")
    config = write_tiny("llama", tmp_path / "out")
    before = load_file(config / "model.safetensors")
    save_checkpoint(tmp_path / "ckpts", "b", registry.build(config))
    other = write_tiny("llama", tmp_path / "model")
    refused(run("export-hf", tmp_path / "ckpts", "--config", other, "--out", config), "already exists")
    after = load_file(config / "model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_comparison_says_of_what(tmp_path: Path, run):
    model = torch.nn.Linear(2, 2)
    config = nxd.neuronx_distributed_config()
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "ckpts", "old", model)
    save_checkpoint(tmp_path / "ckpts", "new", model, optimizer)
    done = run("diff", tmp_path / "ckpts", tmp_path / "ckpts" / "old")
    assert done.status == 1 and f"A: {tmp_path}/ckpts/new" in done.out and f"B: {tmp_path}/ckpts/old" in done.out
    assert "only A has optimizer state: pass --weights-only" in done.out
    done = run("diff", tmp_path / "ckpts", tmp_path / "ckpts" / "old", "--weights-only")
    assert done.status == 0 and "only A" not in done.out
    done = run("diff", tmp_path / "ckpts", tmp_path / "ckpts", "--tag", "old", "--other-tag", "old")
    assert done.status == 0 and f"A: {tmp_path}/ckpts/old" in done.out and f"B: {tmp_path}/ckpts/old" in done.out
