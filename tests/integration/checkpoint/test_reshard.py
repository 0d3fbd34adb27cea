"""What ranks saved, without processes: resharded as a job of those degrees has it, and taken out for transformers."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from nxd_infer.checkpoint import compare_checkpoints, reshard_checkpoint
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_models import registry
from tests.support.e2e.command import here, refused
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny
from tests.support.trainer.jobs import ZERO1, losses_of, training
from tests.support.trainer.models import decoder, tokens

run = partial(here, "ckpt")
FAMILY = "odd_heads"  # padded at tp 2, padded and replicated at tp 4


def parts_of(options: dict[str, Any], seed: int) -> tuple[Any, Any]:
    return training(partial(decoder, FAMILY, torch.float32), seed=seed, **options)


def saved(root: str, options: dict[str, Any]) -> None:
    parts = parts_of(options, 0)
    losses_of(*parts, 2)
    save_checkpoint(root, "trained", *parts, user_content={"step": 2})


def resumed(root: str, copy: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Three losses after loading the checkpoint itself, and after loading what was made of it for these degrees."""
    found = []
    for path in (root, copy):
        parts = parts_of(options, 1)
        assert load_checkpoint(path, None, *parts)["step"] == 2
        found.append(losses_of(*parts, 3))
    return found[0], found[1]


def saved_again(root: str, out: str, options: dict[str, Any]) -> None:
    """What a job of the degrees in force makes of the checkpoint."""
    parts = parts_of(options, 1)
    load_checkpoint(root, None, *parts)
    save_checkpoint(out, "trained", *parts)


def same_files(first: Path, second: Path, pattern: str) -> None:
    names = sorted(path.name for path in first.glob(pattern))
    assert names and names == sorted(path.name for path in second.glob(pattern))
    for name in names:
        a, b = load_file(first / name), load_file(second / name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a), name


def test_resharded_is_what_a_job_would_have_saved(tmp_path: Path):
    """tp 2 -> tp 1 dp 2 (ZeRO-1 stays unsharded) -> tp 4 -> tp 2: tensor for tensor, and the two ends are equal."""
    start = tmp_path / "start"
    run_ranks(saved, 2, str(start), {}, tp=2)
    before = start
    for tp, dp in ((1, 2), (4, 1), (2, 1)):
        out = tmp_path / f"tp{tp}"
        done = run("reshard", before, out, "--tp", tp, "--dp", dp)
        assert done.status == 0, done.err
        assert f"tp {tp} dp {dp}" in done.out
        same = run("diff", start, out)
        assert same.status == 0 and " 0 differ" in same.out, same.out
        before = out
    same_files(start / "trained", tmp_path / "tp2" / "trained", "model.*.safetensors")
    same_files(start / "trained", tmp_path / "tp2" / "trained", "optim.*.safetensors")
    native = tmp_path / "native"
    run_ranks(saved_again, 1, str(start), str(native), {}, tp=1)
    same_files(native / "trained", tmp_path / "tp1" / "trained", "model.*.safetensors")
    for losses, again in run_ranks(resumed, 2, str(start), str(tmp_path / "tp1"), {}, tp=1):
        assert losses == again


def test_a_sharded_optimizer(tmp_path: Path):
    """ZeRO-1 over two ranks -> tp 2 dp 1 and tp 2 dp 3, whose losses are those of loading the original."""
    start = tmp_path / "start"
    run_ranks(saved, 2, str(start), ZERO1, tp=1)
    for tp, dp in ((2, 1), (2, 3)):
        out = tmp_path / f"dp{dp}"
        assert run("reshard", start, out, "--tp", tp, "--dp", dp).status == 0
        assert len(list((out / "trained").glob("optim.*"))) == tp * dp
        assert " 0 differ" in run("diff", out, start).out
        manifest = json.loads((out / "trained" / "manifest.json").read_text())
        assert manifest["resharded_from"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 1} and manifest["blake3"]
    for losses, again in run_ranks(resumed, 2, str(start), str(tmp_path / "dp3"), {}, tp=2):
        assert losses == again


class Partly(nn.Module):
    """Has parameters without dimensions and without elements, as of a layer that was cut away."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layer, self.none = nn.Linear(6, 3), nn.Linear(6, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x).sum() + self.none(x).sum()


def trained_partly() -> tuple[Any, Any]:
    parts = training(Partly, **ZERO1)
    parts[0].run_train(torch.ones(2, 6))
    parts[1].step()
    return parts


def saved_partly(root: str) -> None:
    model, optimizer = trained_partly()
    save_checkpoint(root, "trained", model, optimizer)
    save_checkpoint(f"{root}/optimizer", "trained", optimizer=optimizer)


def resumed_partly(root: str) -> bool:
    wanted = trained_partly()[0].state_dict()
    model, optimizer = training(Partly, seed=1, **ZERO1)
    load_checkpoint(f"{root}/optimizer", optimizer=optimizer)
    load_checkpoint(root, "trained", model, optimizer)
    return all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_parameters_without_elements_are_not_missed(tmp_path: Path):
    """ZeRO-1 over several ranks gives them to no rank."""
    root, other = tmp_path / "sharded", tmp_path / "one"
    run_ranks(saved_partly, 2, str(root), tp=1)
    reshard_checkpoint(root, other, tp=1, dp=1)
    reshard_checkpoint(root / "optimizer", other / "optimizer", tp=1, dp=1)
    assert not compare_checkpoints(root, other).differences
    for there in (root, other):
        assert run_ranks(resumed_partly, 2, str(there), tp=1) == [True, True]


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
    config, out = write_tiny("llama", tmp_path / "llama"), tmp_path / "out"
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
