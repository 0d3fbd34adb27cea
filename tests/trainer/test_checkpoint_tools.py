"""``nxd-infer ckpt``: what a job of two ranks saved, taken out without processes; transformers reads it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxd_infer.trainer.checkpoint import save_checkpoint
from nxd_models import registry
from tests.e2e.command import nxd_infer_here
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny
from tests.trainer.jobs import training
from tests.trainer.models import tokens

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
    logits, _ = run_ranks(trained, 2, str(config), str(root), tp=2, timeout=120)

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
