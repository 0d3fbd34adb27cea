"""``nxd-infer ckpt``: what a job of two ranks saved, taken out without processes; transformers reads it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from nxd_infer.checkpoint.api import save_checkpoint
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_models import registry
from tests.support.e2e.command import here, refused
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny
from tests.support.trainer.jobs import training
from tests.support.trainer.models import tokens

run = partial(here, "ckpt")
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


def test_exported_weights(tmp_path: Path):
    """With a vocabulary and widths that are padded at tp 2; qwen2 is tied and has biases."""
    config = write_tiny("qwen2", tmp_path / "model", intermediate_size=45, vocab_size=289)
    root, out = tmp_path / "ckpts", tmp_path / "exported"
    logits, _ = run_ranks(trained, 2, str(config), str(root), tp=2)

    done = run("export-hf", root, "--config", config, "--out", out)
    assert done.status == 0, done.err
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    assert (out / "tokenizer.json").is_file()

    arguments = ("consolidate", root, "--tag", "first", "--dtype", "bfloat16", "--out", tmp_path / "half")
    assert run(*arguments).status == 0
    half, whole = load_file(tmp_path / "half" / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: value.shape for name, value in half.items()} == {name: value.shape for name, value in whole.items()}
    assert {value.dtype for value in half.values()} == {torch.bfloat16}

    listed = run("inspect", root)
    assert listed.status == 0 and "first" in listed.out and "second" in listed.out and "tp 2" in listed.out
    shown = run("inspect", root, "--tag", "second")
    assert f"model: {len(whole)} tensors" in shown.out and "[289, 32]" in shown.out


def adapted(config: Path, root: Path, **options: Any) -> Path:
    model = registry.build(config, dtype=torch.float32)
    save_checkpoint(root, "a", LoRAModel(model, LoraConfig(lora_rank=2, target_modules=["q_proj"], **options)))
    return root


def test_an_adapter_is_no_model(tmp_path: Path):
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
    shutil.copyfile(config / "config.json", beside / "config.json")
    done = run("consolidate", beside, "--out", beside)  # where its configuration is already
    assert done.status == 0 and "unmerged" in done.out and (beside / "model.safetensors").is_file(), done.err

    merged = adapted(config, tmp_path / "merged", save_lora_base=True, merge_lora=True)
    done = run("export-hf", merged, "--config", config, "--out", out)
    assert done.status == 0 and "note" not in done.out, done.err
    assert load_file(out / "model.safetensors").keys() == load_file(config / "model.safetensors").keys()


def test_an_export_is_of_the_model_of_its_configuration(tmp_path: Path):
    config = write_tiny("llama", tmp_path / "model")
    save_checkpoint(tmp_path / "ckpts", "a", registry.build(config))
    other = write_tiny("llama", tmp_path / "other", num_hidden_layers=3)
    done = run("export-hf", tmp_path / "ckpts", "--config", other, "--out", tmp_path / "out")
    refused(done, "do not belong to this model", "missing: model.layers.2.")
    assert not (tmp_path / "out").exists()
