"""A decoder of two and three shapes through both generations of model builders: traced, saved, loaded, called."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from nxd_infer.compat.model_builder import functions
from nxd_infer.compat.model_builder.first_generation import BaseModelInstance, ModelBuilder
from nxd_infer.compat.model_builder.functions import shard_checkpoint
from nxd_infer.compat.model_builder.nxd_model import NxDModel, replace_weights
from nxd_infer.compat.model_builder.parallel_context import NxDParallelState, init_on_device
from nxd_infer.errors import (
    ArtifactError,
    BucketError,
    InputMismatchError,
    TraceConfigError,
    TraceError,
    WeightMismatchError,
    WeightSchemaError,
)
from nxd_infer.trace import BucketModelConfig, parallel_model_recompile
from nxd_infer.verify import verify_artifact
from tests.support.builder_models import (
    DECODE,
    LONG,
    PREFILL,
    Decoder,
    DecoderInstance,
    InPlace,
    eager,
    generate,
    in_a_fresh_process,
    inputs,
    weights,
)
from tests.support.http.http_artifacts import real_server
from tests.support.needs import require_native

COUNT = 8


@pytest.fixture(autouse=True)
def _native():
    require_native()


def first(degree: int, **options) -> ModelBuilder:
    builder = ModelBuilder(None, degree, weights, **options)
    words = "--auto-cast=none --model-type=transformer -O1"
    builder.add("context_encoding_model", DecoderInstance(), [PREFILL], compiler_args=words, priority_model_idx=0)
    return builder.add("token_generation_model", DecoderInstance(), [DECODE], compiler_args="--auto-cast=none -O2")


def second(degree: int, tied: bool = False) -> tuple[NxDModel, nn.Module]:
    with NxDParallelState(world_size=degree, tensor_model_parallel_size=degree), init_on_device(torch.device("meta")):
        decoder = InPlace(tied)
    builder = functions.ModelBuilder(decoder).trace(args=PREFILL, tag="prefill")
    builder.trace(kwargs=dict(zip(("input_ids", "position_ids"), DECODE, strict=True)), tag="decode")
    return builder.compile(priority_model_key="decode", compiler_args={"prefill": "-O1", "decode": "-O2"}), decoder


@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.smoke), 4])
def test_both_generations_give_eagers_tokens_after_save_and_load_in_a_fresh_process(degree: int, tmp_path):
    model = first(degree).trace()
    assert generate(model, COUNT) == eager(COUNT)
    assert model.model.trace_report["ignored_compiler_args"][:3] == [
        "--auto-cast=none",
        "--model-type=transformer",
        "-O1",
    ]
    torch.jit.save(model, str(tmp_path / "first"))
    model.model.close()

    model, decoder = second(degree, tied=True)
    with pytest.raises(WeightSchemaError, match=r"saved without its weights, and .* are still missing"):
        model(*PREFILL)
    shards = shard_checkpoint(weights(tied=True), decoder)
    model.set_weights(shards)
    assert generate(model.to_neuron(), COUNT) == eager(COUNT, tied=True)
    model.save(tmp_path / "second", save_weights=True)
    model.model.close()
    assert in_a_fresh_process(COUNT, tmp_path / "first", tmp_path / "second") == [eager(COUNT), eager(COUNT, tied=True)]


PROGRAM = """
import json, sys
import torch
from safetensors.torch import load_file
from neuronx_distributed.trace.model_builder import ModelBuilder
from tests.support.builder_models import LONG, generate

folder, ranks = sys.argv[1], int(sys.argv[2])
traced_model = torch.jit.load(folder + "/model.pt")
weights = [load_file(f"{folder}/weights/tp{rank}_sharded_checkpoint.safetensors") for rank in range(ranks)]
traced_model.nxd_model.initialize(weights, torch.tensor([0], dtype=torch.int32))
print(json.dumps([generate(traced_model, 8), generate(traced_model, 4, LONG)]))
"""


def test_as_nxd_inference_does_it(tmp_path):
    """Compiled without weights, which are sharded into files; in another process loaded, given them, and called."""
    ranks = {"pp_degree": 1, "ep_degree": 1, "world_size": 2, "start_rank_id": 0, "local_ranks_size": 2}
    builder = ModelBuilder(None, 2, weights, num_cores_per_group=1, init_custom_process_group_fn=None, **ranks)
    config = BucketModelConfig(func_kwargs=[{"bucket_rank": 0}, {"bucket_rank": 1}])
    builder.add("context_encoding_model", DecoderInstance(), [PREFILL, inputs(LONG)], bucket_config=config)
    builder.add("token_generation_model", DecoderInstance(), [DECODE])
    traced = builder.trace(initialize_model_weights=False)
    names = [bucket.name for bucket in traced.model.buckets]
    assert names == ["context_encoding_model_0", "context_encoding_model_1", "token_generation_model"]
    torch.jit.save(traced, str(tmp_path / "model.pt"))
    shards = builder.shard_checkpoint(serialize_path=tmp_path / "weights")
    assert shards[0].keys() == shards[1].keys() == weights().keys()
    with pytest.raises(WeightSchemaError, match="are still missing"):
        NxDModel.load(tmp_path / "model.pt").nxd_model.initialize_with_saved_weights(torch.tensor([0]))
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "nxd_infer.compat", tmp_path / "program.py", tmp_path, "2"]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [eager(8), eager(4, prompt=LONG)]


def test_weights_are_replaced():
    model, decoder = second(2)
    model.set_weights(shard_checkpoint(weights(), decoder))
    generate(model, 2)
    other = {name: tensor * 0.7 for name, tensor in weights().items()}
    model.model.reset_states()
    model.replace_weights(shard_checkpoint(other, decoder))
    tokens = generate(model, COUNT)
    model.model.reset_states()
    replace_weights(model, other)  # logical ones, by name
    assert generate(model, COUNT) == tokens != eager(COUNT)
    shards = shard_checkpoint(weights(), decoder)
    with pytest.raises(WeightSchemaError, match="for each rank of 2, got 1"):
        model.set_weights(shards[:1])
    with pytest.raises(WeightSchemaError, match="of another degree or another model"):
        model.set_weights(shard_checkpoint(weights(), Decoder()) * 2)
    del shards[0]["lm_head.weight"], shards[1]["lm_head.weight"]
    with pytest.raises(WeightSchemaError, match=r"of lm_head.weight are missing"):
        model.set_weights(shards)
    model.model.close()


class Scaled(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.factor


def scaled(router=None, **options) -> ModelBuilder:
    builder = ModelBuilder(router, 1, lambda: {"weight": torch.tensor([1.0, 2.0, 3.0])}, **options)
    x, y = (torch.ones(3),), (torch.ones(1, 3),)
    builder.add("plain", BaseModelInstance(lambda: Scaled(1.0), {}), [x])
    return builder.add("twice", BaseModelInstance(lambda: Scaled(2.0), {}), [x, y])


@torch.jit.script
def by_sign(inputs: list[Tensor]) -> str:
    return "plain" if bool(inputs[0].sum() > 0) else "twice"


@torch.jit.script
def by_sign_and_rank(inputs: list[Tensor]) -> tuple[str, int]:
    number = 1 if inputs[0].dim() == 2 else 0
    return ("plain" if bool(inputs[0].sum() > 0) and number == 0 else "twice"), number


def test_a_router_chooses_key_and_shape_before_and_after_saving(tmp_path):
    x = torch.ones(3)
    torch.jit.save(scaled(by_sign).trace(), tmp_path / "router")
    model = NxDModel.load(tmp_path / "router")
    assert model(x).tolist() == [1, 2, 3] and model(-x).tolist() == [-2, -4, -6]
    model = scaled(by_sign_and_rank).trace()
    assert model(x).tolist() == [1, 2, 3] and model(x[None]).tolist() == [[2, 4, 6]]


@torch.jit.script
def pad(inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    length = inputs[0].shape[0]
    number = 0 if length <= 3 else 1
    return [F.pad(one, [0, 3 * (number + 1) - length]) for one in inputs], torch.tensor([number])


class Total(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight[0] * self.factor).sum()


def test_a_bucket_kernel_pads_and_chooses_among_the_shapes_of_its_key():
    builder = ModelBuilder(None, 1, lambda: {"weight": torch.full((3,), 2.0)})
    examples, config = [(torch.ones(3),), (torch.ones(6),)], BucketModelConfig(lambda: pad)
    model = builder.add("a", BaseModelInstance(lambda: Total(1.0)), examples, bucket_config=config).trace()
    assert [model(torch.ones(length)).item() for length in (2, 3, 5)] == [4, 6, 10]
    builder.add("b", BaseModelInstance(lambda: Total(1.0)), examples[:1])
    with pytest.raises(TraceConfigError, match="there is a router or another key"):
        builder.trace()


def test_without_a_router_the_shape_decides_and_a_name_where_it_cannot(monkeypatch):
    monkeypatch.delenv("OF_THE_TRACE", raising=False)
    model = scaled(master_proc_env_vars={"OF_THE_TRACE": "1"}, debug=True, logical_nc_config=2).trace()
    x = torch.ones(3)
    assert model(x[None]).tolist() == [[2, 4, 6]] and model(x=x[None]).tolist() == [[2, 4, 6]]
    assert model(x, model_name="twice_0").tolist() == [2, 4, 6]
    with pytest.raises(InputMismatchError, match="one of plain, twice_0, which take such inputs"):
        model(x)
    with pytest.raises(InputMismatchError, match="model_name='thrice' must be one of"):
        model(x, model_name="thrice")
    with pytest.raises(BucketError, match=r"no bucket fits x: float32\[7\]"):
        model(torch.ones(7))
    with pytest.raises(InputMismatchError, match="forward_mode='ranked'"):
        model(x[None], forward_mode="ranked")


def test_the_functions_do_what_the_builder_does(tmp_path):
    module = Scaled(2.0)
    traced = functions.trace(module, args=torch.ones(3))
    module.factor = 3.0  # what was traced stays
    compiled = functions.compile(traced.hlo, traced.metaneff, compiler_args="-O1", key="a")
    wlo = functions.compile_wlo(traced.hlo, traced.metaneff, key="a")
    transformer = functions.compile_layout_transformer(wlo, traced.weight_name_to_idx)
    model = NxDModel(world_size=1, layout_transformer=transformer).add("a", traced, compiled)
    model.add("b", functions.trace(module, kwargs={"x": torch.ones(1, 3)}))
    model.set_weights([{"weight": torch.tensor([1.0, 2.0, 3.0])}])
    assert model(torch.ones(3)).tolist() == [2, 4, 6] and model(x=torch.ones(1, 3)).tolist() == [[3, 6, 9]]
    with pytest.raises(TraceConfigError, match="compiled already"):
        model.add("c", traced)
    with pytest.raises(TraceConfigError, match="is 2, and the model was built for 1 ranks"):
        NxDModel(world_size=2).add("a", traced)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ep_degree": 2}, "ep_degree=2"),
        ({"local_ranks_size": 7}, "local_ranks_size=7"),
        ({"start_rank_id": 1}, "start_rank_id=1"),
        ({"unknown": None}, "unknown=None"),
    ],
)
def test_what_this_host_cannot_do_is_refused_by_name(options, text):
    with pytest.raises(TraceConfigError, match=text):
        ModelBuilder(None, 2, weights, **options)


def test_wrong_use_is_refused(tmp_path):
    builder = scaled()
    with pytest.raises(TraceConfigError, match="the key 'plain' was added before"):
        builder.add("plain", BaseModelInstance(lambda: Scaled(1.0)), [(torch.ones(3),)])
    with pytest.raises(TraceConfigError, match="priority_model_idx=1: 'other' has 1 shapes"):
        builder.add("other", BaseModelInstance(lambda: Scaled(1.0)), [(torch.ones(3),)], priority_model_idx=1)
    with pytest.raises(TraceConfigError, match="there is nothing to trace"):
        ModelBuilder(None, 1, weights).trace()
    builder.checkpoint_loader = lambda: {"weight": torch.ones(4)}
    with pytest.raises(WeightMismatchError, match=r"weight is \[4\], wanted \[3\]"):
        builder.trace()
    builder.checkpoint_loader = None
    with pytest.raises(TraceConfigError, match="needs a checkpoint_loader"):
        builder.trace()
    model = builder.trace(initialize_model_weights=False)
    with pytest.raises(WeightSchemaError, match="weight have no values yet"):
        model.save(tmp_path / "a", save_weights=True)
    with pytest.raises(TraceConfigError, match="all ranks run on this host, from rank 0"):
        model.initialize([{"weight": torch.ones(3)}], torch.tensor([2]))
    assert builder.trace(initialize_model_weights=False, dry_run=True).__class__.__name__ == "TracePlan"
    with pytest.raises(TraceError, match="state 'nothing' is not a buffer"):
        ModelBuilder(None, 1, dict).add(
            "a", BaseModelInstance(lambda: Scaled(1.0), {"nothing": 1}), [torch.ones(3)]
        ).trace()


def test_what_a_builder_made_is_served_recompiled_and_checked_like_any_other(tmp_path):
    model = first(1).trace()
    model.save(tmp_path / "a")
    parallel_model_recompile(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ArtifactError, match="model directory"):
        verify_artifact(tmp_path / "b", save_file(weights(), tmp_path / "model.safetensors") or tmp_path)
    with real_server(tmp_path / "b") as server:

        def step(ids: Tensor, positions: Tensor) -> Tensor:
            body = {"inputs": {"input_ids": ids.tolist(), "position_ids": positions.tolist()}}
            (output,) = server.post("/v1/predict", body).json()["outputs"].values()
            return torch.tensor(output["data"])

        assert generate(step, COUNT) == eager(COUNT)
