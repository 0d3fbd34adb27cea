"""Tracing, saving and loading a model for inference, as the API reference calls it: every argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxd_infer import compat

compat.install()

import neuronx_distributed as nxd
from neuronx_distributed.trace import parallel_model_load, parallel_model_save, parallel_model_trace
from torch_neuronx import BucketModelConfig

from tests.support.seeds.degrees import alone
from tests.support.seeds.model import Config, get_model


class Logits(torch.nn.Module):
    """Tensors in, a tensor out, as tracing wants it: what is looked up, and the first layer of the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        model = get_model(Config(num_layers=1))
        self.embed_tokens, self.layer = model.embed_tokens, model.layers[0]

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.embed_tokens(input_ids))


def get_logits() -> tuple[torch.nn.Module, dict]:
    """What ``func`` is: a model and a dictionary of states."""
    return Logits().eval(), {}


def smallest_that_fits():
    return torch.jit.script(_smallest_that_fits)


def _smallest_that_fits(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    index = 0 if tensors[0].shape[1] <= 8 else 1
    return tensors, torch.tensor([index])


def ids(length: int = 8) -> Tensor:
    return torch.arange(2 * length).view(2, length) % 24


def expected(x: Tensor) -> Tensor:
    with torch.no_grad():
        return alone(Logits)(x)


def close(found: Any, x: Tensor) -> bool:
    return torch.allclose(found, expected(x), atol=1e-5)


def test_every_argument_by_place_and_by_name(tmp_path: Path):
    """Words for the Neuron compiler are ignored and named; what is saved is what is loaded."""
    work, words = tmp_path / "some" / "work", ["--model-type=transformer", "-O1"]
    by_place = (get_logits, ids(), work, words, True, None, 1, None)
    by_name = {
        "func": get_logits, "example_inputs": ids(), "compiler_workdir": str(work), "compiler_args": " ".join(words),
        "inline_weights_to_neff": True, "bucket_config": None, "tp_degree": 2, "max_parallel_compilations": 1,
    }  # fmt: skip
    for place, arguments, named in (("place", by_place, {}), ("name", (), by_name)):
        with parallel_model_trace(*arguments, **named, backend="eager") as model:
            assert isinstance(model, nxd.trace.TensorParallelModel)
            assert close(model(ids()), ids())
            assert model.trace_report["ignored_compiler_args"] == words and work.is_dir()
            if place == "place":
                parallel_model_save(model, tmp_path / place)
            else:
                nxd.trace.parallel_model_save(model=model, save_dir=str(tmp_path / place))
    for model in (parallel_model_load(tmp_path / "place"), nxd.trace.parallel_model_load(load_dir=tmp_path / "name")):
        with model:
            assert close(model(ids()), ids())


@pytest.mark.smoke
def test_buckets(tmp_path: Path):
    """``example_inputs`` is a list with the inputs of each bucket; the buckets share weights that are not inlined."""
    with nxd.trace.parallel_model_trace(
        get_logits,
        [(ids(8),), (ids(12),)],
        compiler_workdir=tmp_path / "work",
        compiler_args=["--model-type=transformer"],
        inline_weights_to_neff=False,
        bucket_config=BucketModelConfig(bucket_kernel=smallest_that_fits),
        tp_degree=1,
        max_parallel_compilations=1,
        backend="eager",
    ) as model:
        for length in (8, 12):
            assert close(model(ids(length)), ids(length))


def test_inlined_weights_have_no_buckets():
    with pytest.raises(nxd.errors.TraceConfigError, match="pass inline_weights_to_neff=False"):
        parallel_model_trace(get_logits, [(ids(),)], bucket_config=BucketModelConfig(smallest_that_fits))
