"""Every argument of the Parallelizer acts."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.context import current_context
from nxd_infer.distributed.parallelizer import ParallelizersManager
from nxd_infer.errors import CheckpointError, InputMismatchError, ParallelConfigError
from nxd_infer.parallel_layers.layers import ParallelEmbedding
from tests.integration.distributed.test_apply import NEAR
from tests.support.distributed.models import LOOSE, TIED, Case
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
LLAMA = Case("llama", 8, 2, LOOSE)
Parallelizer = ParallelizersManager.parallelizer_for_model("llama")


def same_logits(model: nn.Module, whole: nn.Module) -> bool:
    with torch.no_grad():
        return torch.allclose(model(**LLAMA.batch()).logits, whole(**LLAMA.batch()).logits, **NEAR)


def refusal(error: type[Exception], action: Any) -> str:
    with pytest.raises(error) as found:
        action()
    return str(found.value)


def lazily(folder: Path) -> Any:
    import transformers

    with nxd.distributed.lazy_load_for_parallelism(tensor_parallel_size=2):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def tensor_parallel(folder: Path) -> dict[str, Any]:
    whole, found = LLAMA.build().eval(), {}
    model = Parallelizer.parallelize(LLAMA.build().eval(), parallelize_embeddings=False)
    found["embeddings"] = type(model.model.embed_tokens) is nn.Embedding and same_logits(model, whole)

    model = Parallelizer.parallelize(LLAMA.build().eval(), kv_size_multiplier=2)
    found["kv_size_multiplier"] = (model.model.layers[0].self_attn.k_proj.weight.shape[0], same_logits(model, whole))
    found["bad kv_size_multiplier"] = refusal(
        ParallelConfigError, lambda: Parallelizer.parallelize(LLAMA.build(), kv_size_multiplier=3)
    )

    model = LLAMA.build().eval()
    kept = {id(inner) for inner in model.model.layers[1].mlp.modules()}
    model = nxd.distributed.apply_plan(
        model, nxd.distributed.plan_for(model.config), should_parallelize=lambda inner: id(inner) not in kept
    )
    kinds = [type(layer.mlp.up_proj).__name__ for layer in model.model.layers]
    found["predicate"] = (kinds, same_logits(model, whole))
    found["unknown keyword"] = refusal(ParallelConfigError, lambda: Parallelizer._parallelize(LLAMA.build(), depth=3))
    split = Parallelizer._parallelize(LLAMA.build(), should_parallelize_layer_predicate_func=lambda inner: False)
    found["nothing"] = not any(weight.is_meta for weight in split.parameters())

    found["device"] = set()
    for loaded in (lazily(folder / "llama"), LLAMA.build()):
        model = Parallelizer.parallelize(loaded, device="meta")
        found["device"] |= {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}

    found["own device"] = [
        not any(weight.is_meta for weight in model.parameters()) and same_logits(model, whole)
        for loaded in (lazily(folder / "llama"), LLAMA.build())
        for model in [Parallelizer._parallelize(loaded.eval(), torch.device("cpu"))]
    ]
    for predicate in (None, lambda inner: not isinstance(inner, nn.Embedding)):
        for loaded in (lazily(folder / "llama"), LLAMA.build()):
            model = Parallelizer._parallelize(loaded.eval(), should_parallelize_layer_predicate_func=predicate)
            weights = list(model.parameters())
            found["own device"].append(not any(weight.is_meta for weight in weights) and same_logits(model, whole))
    for again in (Parallelizer.parallelize, Parallelizer._parallelize):
        found[f"{again.__name__} twice"] = refusal(ParallelConfigError, functools.partial(again, model))
        model = Parallelizer.parallelize(LLAMA.build().eval())
    assert same_logits(model, whole)
    model = Parallelizer._parallelize(LLAMA.build(), torch.device("meta"))
    found["own device"].append(all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())))

    whole.load_state_dict({name: weight + 0.01 for name, weight in whole.state_dict().items()})
    trained = Parallelizer.parallelize(LLAMA.build().eval())
    with torch.no_grad():
        for weight in trained.parameters():
            weight.add_(0.01)
    Parallelizer.save_model_sharded_checkpoint(trained, folder / "a", async_save=True, use_xser=False)
    nxd.trainer.wait_for_save()
    Parallelizer.save_model_sharded_checkpoint(trained, folder / "b", num_local_ranks_per_step=1)
    for name in ("a", "b/shards"):
        model = Parallelizer.parallelize(LLAMA.build().eval(), checkpoint_dir=folder / name)
        found[name] = same_logits(model, whole)
    found["not parallel"] = refusal(
        ParallelConfigError, lambda: Parallelizer.load_model_sharded_checkpoint(LLAMA.build(), folder / "a")
    )

    model = Parallelizer.parallelize(Case("llama", 8, 2, TIED).build())
    found["tied"] = isinstance(model.model.embed_tokens, ParallelEmbedding) and (
        model.lm_head.weight is model.model.embed_tokens.weight
    )
    found["classifier"] = classifier(folder)
    return found


def classifier(folder: Path) -> torch.Tensor:
    """What a head gets that is not in the files; the ranks' generators differ."""
    import transformers

    with nxd.distributed.lazy_load_for_parallelism(tensor_parallel_size=2):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "llama", num_labels=3)
    torch.manual_seed(current_context().rank)
    return Parallelizer.parallelize(model).score.weight.detach()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    LLAMA.build().save_pretrained(folder / "llama")
    return run_ranks(tensor_parallel, 2, folder, comm_timeout=120)


def test_options_of_tensor_parallelism(ranks):
    for found in ranks:
        assert found["embeddings"], "they stay whole"
        assert found["kv_size_multiplier"] == (2 * 2 * 8 // 2, True), "as many places as requested"
        assert "kv_size_multiplier=3" in found["bad kv_size_multiplier"]
        assert found["predicate"] == (["ColumnParallelLinear", "Linear"], True) and found["nothing"]
        assert "depth" in found["unknown keyword"]
        assert found["device"] == {"meta"}
        assert found["own device"] == [True] * 7, "with its weights, from memory and from files"
        assert all("is parallelized already" in found[f"{name} twice"] for name in ("parallelize", "_parallelize"))
        assert found["tied"]


def test_shards_are_loaded_from_either_folder(ranks):
    for found in ranks:
        assert (found["a"], found["b/shards"]) == (True, True)
        assert "parallelized first" in found["not parallel"]


def test_a_new_head_is_equal_on_all_ranks(ranks):
    first, second = (found["classifier"] for found in ranks)
    assert torch.equal(first, second) and first.std() > 0


def pipeline_parallel() -> dict[str, Any]:
    found: dict[str, Any] = {}
    whole = LLAMA.build().train()
    loss = whole(**LLAMA.batch(4)).loss
    loss.backward()
    model = Parallelizer.parallelize(
        LLAMA.build(),
        pipeline_parallel_input_names=["input_ids", "labels"],
        pipeline_parallel_num_microbatches=4,
        pipeline_parallel_use_zero1_optimizer=True,
        pipeline_parallel_gradient_checkpointing_enabled=True,
    )
    batch = {name: tensor for name, tensor in LLAMA.batch(4).items() if name != "attention_mask"}
    found["options"] = (model.options.num_microbatches, model.options.use_zero1_optimizer)
    found["input_names"] = refusal(InputMismatchError, lambda: model.run_train(**LLAMA.batch(4)))
    wanted = whole(**batch).loss
    found["loss"] = abs(float(model.run_train(**batch)) - float(wanted.detach()))
    stage = model.local_module().model.layers[current_context().pp.rank]
    found["recomputes"] = stage.gradient_checkpointing and stage.training
    mapping = nxd.distributed.parameter_mapping(model)
    found["mapped"] = len(mapping) <= len(list(model.local_parameters()))
    shallow = Case("llama", 8, 2, {"num_hidden_layers": 1}).build()
    found["stages"] = refusal(ParallelConfigError, lambda: Parallelizer.parallelize(shallow))
    found["twice"] = refusal(ParallelConfigError, lambda: Parallelizer.parallelize(model))
    return found


def test_pipeline_arguments():
    for found in run_ranks(pipeline_parallel, 2, tp=1, pp=2, comm_timeout=120):
        assert found["options"] == (4, True)
        assert "attention_mask" in found["input_names"]
        assert found["loss"] < 1e-5
        assert found["recomputes"] and found["mapped"]
        assert "1 layers" in found["stages"] and "is parallelized already" in found["twice"]


# --- without ranks -----------------------------------------------------------------------------------------------


def test_lazy_loading_refuses_quantized_weights(tmp_path: Path):
    """Their scales would be left out, and what is read would be other numbers."""
    import transformers

    LLAMA.build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    with (
        nxd.distributed.lazy_load_for_parallelism(tensor_parallel_size=2),
        pytest.raises(ParallelConfigError, match=r"has quantized weights \(quant_method = 'fp8'\)"),
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_loading_is_lazy_in_the_context_only(tmp_path: Path):
    import transformers

    LLAMA.build().save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with nxd.distributed.lazy_load_for_parallelism():
        assert not load(tmp_path).lm_head.weight.is_meta
    with nxd.distributed.lazy_load_for_parallelism(pipeline_parallel_size=2):
        there: list[bool] = []
        other = threading.Thread(target=lambda: there.append(load(tmp_path).lm_head.weight.is_meta))
        other.start()
        # One after the other: from_pretrained sets torch's default dtype, which all threads share.
        other.join(120)
        assert there == [False]
        model = load(tmp_path, dtype=torch.bfloat16)
        assert model.lm_head.weight.is_meta and model.dtype == torch.bfloat16
        with pytest.raises(ParallelConfigError, match="quantization_config"):
            load(tmp_path, quantization_config={"load_in_8bit": True})
        with pytest.raises(ParallelConfigError, match="device_map"):
            load(tmp_path, device_map="auto")
    assert not load(tmp_path).lm_head.weight.is_meta
    for file in tmp_path.glob("*.safetensors"):
        file.rename(tmp_path / "pytorch_model.bin")
    with nxd.distributed.lazy_load_for_parallelism(2), pytest.raises(CheckpointError, match="never loaded"):
        Parallelizer.parallelize(load(tmp_path))
