"""Weights out of training, at another degree: into a trace, into a running model, and out of the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import (
    CheckpointError,
    TraceConfigError,
    WeightMismatchError,
    WeightSchemaError,
)
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.parallel_state import get_tensor_model_parallel_size
from nxd_infer.trace import parallel_model_trace
from nxd_infer.trainer import gather_weights
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import training
from tests.support.trainer.models import decoder, llama, tokens

IDS = tokens()["input_ids"]
EAGER = {"backend": "eager", "inline_weights_to_neff": False}


def tied():
    return decoder("tied")


def step(model, optimizer) -> None:
    model.run_train(input_ids=IDS, labels=IDS)
    optimizer.step()
    optimizer.zero_grad()


def logits_of(model) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS)


def train(root: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Save "a" and "b" at the degrees in force; the logits of both, and of a third step the gathered weights."""
    model, optimizer = training(llama)
    if get_tensor_model_parallel_size() > 1:  # a shard is not taken for the whole
        with pytest.raises(CheckpointError, match=r"rank . of 2.*gather_weights"):
            weight_source(model)
    found = []
    for tag in ("a", "b"):
        step(model, optimizer)
        nxd.save_checkpoint(root, tag, model, optimizer)
        found.append(logits_of(model))
    step(model, optimizer)
    found.append(logits_of(model))
    return found, gather_weights(model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, logits of "a", "b" and the third step, weights of the third) of two ranks."""
    root = tmp_path_factory.mktemp("trained") / "ckpts"
    (logits, weights), (_, nothing) = run_ranks(train, 2, str(root), tp=2)
    assert nothing == {}
    return root, logits, weights


def close(out: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_is_traced_and_swapped_at_a_lower_degree(trained):
    root, (a, b, c), weights = trained
    with parallel_model_trace(llama, IDS, checkpoint=root, checkpoint_tag="a", **EAGER) as model:
        close(model(IDS), a)
        model.update_weights(root)  # the newest
        close(model(IDS), b)
        model.update_weights(root / "a")  # one checkpoint's own folder
        close(model(IDS), a)
        model.update_weights(root, tag="b")
        close(model(IDS), b)
        model.update_weights(weights)
        close(model(IDS), c)
        with pytest.raises(CheckpointError, match="'c'"):
            model.update_weights(root, tag="c")
        with pytest.raises(CheckpointError, match="the tag 'a' names a checkpoint"):
            model.update_weights(weights, tag="a")
        new = model.cut_weights(root, tag="a")
        close(model(IDS), c)  # not used yet
        model.update_weights(new)
        close(model(IDS), a)


def test_a_checkpoint_is_traced_and_swapped_at_a_higher_degree(tmp_path):
    (a, b, _), _ = train(str(tmp_path / "ckpts"))
    more = {"tp_degree": 2, "checkpoint": tmp_path / "ckpts", "checkpoint_tag": "a"}
    with parallel_model_trace(llama, IDS, **more, **EAGER) as model:
        close(model(IDS), a)
        model.update_weights(tmp_path / "ckpts")
        close(model(IDS), b)


def test_a_model_in_training_gives_its_weights(trained):
    """At degree 1 directly: plain, in its wrapper, and with adapters, merged or not."""
    _, (_, _, c), weights = trained
    with parallel_model_trace(llama, IDS, checkpoint=weights, **EAGER) as model:
        close(model(IDS), c)
        training_model, optimizer = training(llama, seed=3)
        step(training_model, optimizer)
        model.update_weights(training_model)
        close(model(IDS), logits_of(training_model))
        torch.manual_seed(4)
        adapted = LoRAModel(llama(), LoraConfig(lora_rank=2, target_modules=["q_proj", "up_proj", "lm_head"]))
        with torch.no_grad():
            for name, param in adapted.named_parameters():
                if name in adapted.adapter_names:
                    param.normal_(std=0.3)
        want = logits_of(adapted.eval())
        model.update_weights(adapted)
        close(model(IDS), want)
        model.update_weights(weights)
        model.update_weights(adapted.merge())
        close(model(IDS), want)


def test_what_does_not_fit_is_listed(trained, tmp_path):
    root, (a, _, _), weights = trained
    with parallel_model_trace(llama, IDS, checkpoint=root, checkpoint_tag="a", **EAGER) as model:
        with pytest.raises(WeightSchemaError, match=r"missing: lm_head.weight"):
            model.update_weights(tied())
        save_adapter_checkpoint(tmp_path / "lora", save_lora_base=True)
        with pytest.raises(CheckpointError, match=r"beside the weights.*merge_lora=True"):
            model.update_weights(tmp_path / "lora")
        save_adapter_checkpoint(tmp_path / "alone")
        with pytest.raises(CheckpointError, match=r"only a LoRA adapter .*a/lora_adapter with --lora-slots, or save"):
            model.update_weights(tmp_path / "alone")
        with pytest.raises(CheckpointError, match="neither a safetensors file nor a directory"):
            model.update_weights(tmp_path / "nothing")
        close(model(IDS), a)
    with parallel_model_trace(llama, IDS, checkpoint=weights, **EAGER) as other, pytest.raises(WeightSchemaError):
        other.update_weights(model.cut_weights(root))
    with pytest.raises(WeightMismatchError, match=r"(?s)do not fit the model.*missing: .*lm_head"):
        parallel_model_trace(llama, IDS, checkpoint=tied(), **EAGER)
    with pytest.raises(TraceConfigError, match="give one"):
        parallel_model_trace(llama, IDS, checkpoint=root, checkpoint_loader_callable=dict, **EAGER)
    with pytest.raises(TraceConfigError, match="needs checkpoint"):
        parallel_model_trace(llama, IDS, checkpoint_tag="a", **EAGER)


def save_adapter_checkpoint(root: Path, **options: Any) -> None:
    model = LoRAModel(llama(), LoraConfig(lora_rank=2, target_modules=["q_proj"], **options))
    nxd.save_checkpoint(root, "a", model)
