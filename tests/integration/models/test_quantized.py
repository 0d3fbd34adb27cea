"""Quantised models as people download them: traced, verified, trained and exported as plain ones of equal weights."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import nxd_infer as nxd
from nxd_infer.errors import CheckpointError
from nxd_infer.hugging_face import weights as hf
from nxd_infer.recipes.job import make_model
from nxd_models import registry
from tests.support.e2e.command import here
from tests.support.models import quantized
from tests.support.models.helpers import prompts_of, relative_difference
from tests.support.models.quantized import AWQ, GPTQ, compressed_config, write_quantized
from tests.support.ranks import run_ranks
from tests.support.recipes.jobs import alone, write, write_pairs
from tests.support.tiny_models import write_tiny

IDS = torch.tensor(prompts_of([24, 24], 280))
SIZES = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 48]}
EIGHT = compressed_config(8, None, form="int-quantized")


def int8(weight: torch.Tensor) -> quantized.Stored:
    scales = weight.abs().amax(1, keepdim=True) / 127
    levels = (weight / scales).round().to(torch.int8)
    return {"weight": levels, "weight_scale": scales}, levels.float() * scales


def traced(model: Path, out: Path, *options: object) -> str:
    sizes = ("--batch-sizes", 1, "--prompt-buckets", 16, "--max-len", 32, "--dtype", "float32")
    done = here("trace", model, "--out", out, *sizes, *options)
    assert done.status == 0, done.err
    return " ".join(done.out.split())


FIRST = ("llama", GPTQ, quantized.gptq(act_order=True), 2, ["--backend", "eager"], "GPTQ, 4 bits")


@pytest.mark.parametrize(
    ("family", "config", "store", "degree", "options", "said"),
    [
        pytest.param(*FIRST, marks=pytest.mark.smoke),
        ("qwen2", AWQ, quantized.awq(), 2, ["--backend", "eager"], "AWQ, 4 bits"),
        ("qwen3", FP8, quantized.fp8((32, 48)), 2, ["--backend", "eager"], "FP8 in blocks of 32 x 48"),
        ("qwen2", EIGHT, int8, 1, [], "compressed-tensors (int-quantized, 8 bits)"),
        ("mixtral", GPTQ, quantized.gptq(), 2, ["--backend", "eager"], "GPTQ, 4 bits"),
        ("qwen3_moe", FP8, quantized.fp8((32, 48)), 2, ["--backend", "eager"], "FP8 in blocks of 32 x 48"),
        ("qwen3", GPTQ, quantized.gptq(), 2, ["--backend", "eager", "--model-impl", "transformers"], "GPTQ, 4 bits"),
    ],
)
def test_ranks_compute_what_transformers_does_with_the_dequantised_weights(
    tmp_path, family, config, store, degree, options, said
):
    source = write_tiny(
        family, tmp_path / "source", **SIZES, **({"moe_intermediate_size": 64} if "moe" in family else {})
    )
    plain, _ = write_quantized(source, tmp_path / "model", config, store, files=2)
    printed = traced(tmp_path / "model", tmp_path / "artifact", "--tp", degree, *options)
    assert f"note: the weights are stored as {said}, and read as float32" in printed
    verified = here("verify", tmp_path / "artifact", plain, "--tolerance", 1e-5)
    assert verified.status == 0, verified.out
    read = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        expected = read(plain, dtype=torch.float32)(IDS).logits
        assert relative_difference(registry.load_model(tmp_path / "model", dtype=torch.float32)(IDS), expected) < 1e-5
    compared = here("ckpt", "diff", tmp_path / "model", plain)
    assert compared.status == 0, compared.out


def test_what_is_lost_is_said(tmp_path):
    source = write_tiny("llama", tmp_path / "source", **SIZES)
    config = {**EIGHT, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    write_quantized(source, tmp_path / "model", config, int8)
    printed = traced(tmp_path / "model", tmp_path / "artifact", "--quantize", "int8", "--plan-only")
    assert "read as float32; activations are not rounded; keys and values are not rounded" in printed
    assert "; they are rounded a second time, to int8" in printed
    assert "stored as" not in traced(source, tmp_path / "artifact", "--plan-only")


def test_a_recipe_trains_the_dequantised_weights_and_says_so(tmp_path):
    source = write_tiny("llama", tmp_path / "source", **SIZES)
    plain, values = write_quantized(source, tmp_path / "model", GPTQ, quantized.gptq())
    write_pairs(tmp_path)
    recipe = write(tmp_path, 1, "model_alignment_strategy: {sft: {packing: true}}\n")
    checked = here("train", recipe, "--check")
    words = f"the weights in {tmp_path / 'model'} are stored as GPTQ, 4 bits, and trained as float32"
    assert words in " ".join(checked.out.split()), checked.out + checked.err
    ours = make_model(tmp_path / "model", tmp_path / "model", torch.float32, None).state_dict()
    assert torch.equal(ours["model.layers.0.mlp.up_proj.weight"], values["model.layers.0.mlp.up_proj.weight"].float())
    assert alone(recipe) == alone(recipe, [f"model.model_config={plain}"])
    kept = [json.loads(file.read_text()) for file in (tmp_path / "prepared").glob("**/config.json")]
    assert kept and not any("quantization_config" in one for one in kept), "what is trained is plain"


def saved(model_dir: str, root: str) -> None:
    """A training checkpoint of the weights as they are."""
    config = nxd.neuronx_distributed_config(tensor_parallel_size=2)
    model = nxd.initialize_parallel_model(config, lambda: hf.load(registry.build(model_dir), hf.weights(model_dir)))
    nxd.save_checkpoint(root, "first", model=model)


def test_a_directory_that_is_exported_is_plain(tmp_path):
    source, model = write_tiny("llama", tmp_path / "source", **SIZES), tmp_path / "model"
    _, values = write_quantized(source, model, GPTQ, quantized.gptq())
    run_ranks(saved, 2, str(model), str(tmp_path / "ckpts"), tp=2)
    done = here("ckpt", "export-hf", tmp_path / "ckpts", "--config", model, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, weight in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(weight, values[name].float()), name
        assert torch.equal(model.state_dict()[name], weight)


def test_a_model_type_without_a_plan_is_refused_by_name(tmp_path):
    config = transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=280)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": GPTQ}))
    with pytest.raises(CheckpointError, match="stored as GPTQ, 4 bits are not read for a model type without"):
        registry.weights(registry.load_config(tmp_path))
