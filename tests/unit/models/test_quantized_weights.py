"""Quantised checkpoints are read as the values that their formats define, by slices; the rest is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_infer.errors import CheckpointError, ModelConfigError
from nxd_infer.hugging_face.quantized.formats import dequantized
from nxd_infer.hugging_face.weights import stored_weights, weights
from nxd_infer.layout.sources import SafetensorsSource
from nxd_models.registry import load_config, load_model
from tests.support.models import quantized
from tests.support.models.quantized import AWQ, GPTQ, compressed_config
from tests.support.tiny_models import write_tiny

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
FORMS = {
    "gptq": (GPTQ, quantized.gptq()),
    "gptq in 8 bits": ({**GPTQ, "bits": 8}, quantized.gptq(8)),
    "gptq in 2 bits": ({**GPTQ, "bits": 2}, quantized.gptq(2)),
    "gptq, a group per output": ({**GPTQ, "group_size": -1}, quantized.gptq(size=-1)),
    "gptq, a last group that is shorter": ({**GPTQ, "group_size": 96}, quantized.gptq(size=96)),
    "gptq, act-order": ({**GPTQ, "desc_act": True, "group_size": 64}, quantized.gptq(4, 64, True)),
    "gptq, act-order, zeros, 8 bits": ({**GPTQ, "bits": 8}, quantized.gptq(8, 32, True, False)),
    "gptq, zeros of 0": (GPTQ, quantized.gptq(symmetric=False, positive=True)),
    "gptq_v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, quantized.gptq(symmetric=False, v2=True)),
    "gptq, no lm_head": ({**GPTQ, "dynamic": {"-:lm_head": {}}}, quantized.gptq()),
    "gptq, lm_head too": ({**GPTQ, "lm_head": True}, quantized.gptq()),
    "awq": (AWQ, quantized.awq()),
    "awq, groups of 128": ({**AWQ, "group_size": 128, "version": "GEMM"}, quantized.awq(128)),
    "fp8 in blocks": ({**FP8, "weight_block_size": [128, 128]}, quantized.fp8()),
    "fp8 in blocks that do not divide": ({**FP8, "weight_block_size": [48, 96]}, quantized.fp8((48, 96))),
    "fp8, a scale per weight": (FP8, quantized.fp8(None, "weight_scale")),
    "compressed, 4 bits": (compressed_config(4), quantized.compressed(4)),
    "compressed, 8 bits, zeros": (compressed_config(8, symmetric=False), quantized.compressed(8, 32, False)),
    "compressed, 4 bits, act-order": (compressed_config(4, 64), quantized.compressed(4, 64, False, True)),
    "compressed, a group per output": (compressed_config(4, None), quantized.compressed(4, -1)),
}
FORMS["compressed, a last group that is shorter"] = compressed_config(4, 96), quantized.compressed(4, 96)
FORMS["compressed, 4 bits, act-order"][0]["config_groups"]["group_0"]["weights"]["symmetric"] = False


@pytest.mark.parametrize("form", FORMS)
def test_every_slice_has_the_values_that_the_format_defines(tmp_path, form):
    config, store = FORMS[form]
    source = write_tiny("qwen2", tmp_path / "source", **SIZES, tie_word_embeddings=False)
    head = config.get("lm_head", False)
    _, values = quantized.write_quantized(source, tmp_path / "model", config, store, files=3, head=head)
    found, draw = weights(tmp_path / "model"), torch.Generator().manual_seed(0)
    assert set(found.keys()) == set(values)
    for name, value in values.items():
        assert (found.shape(name), found.dtype(name)) == (value.shape, value.dtype)
        assert torch.equal(found.read(name), value), name
        for _ in range(20 if value.ndim == 2 else 0):
            ends = [torch.randint(size + 1, (2,), generator=draw).sort().values.tolist() for size in value.shape]
            slices = tuple(slice(*pair) for pair in ends)
            assert torch.equal(found.read(name, slices), value[slices]), (name, slices)


@pytest.mark.parametrize("form", ["gptq", "fp8 in blocks"])
def test_the_values_are_rounded_once_to_the_dtype_of_the_model(tmp_path, form):
    config, store = FORMS[form]
    source = write_tiny("qwen3", tmp_path / "source", **SIZES)
    _, values = quantized.write_quantized(source, tmp_path / "model", config, store)
    for name, weight in load_model(tmp_path / "model", dtype=torch.bfloat16).state_dict().items():
        if name in values:
            assert torch.equal(weight, values[name].bfloat16()), name


class Counting(SafetensorsSource):
    read_bytes = 0

    def read(self, name, slices=None):
        found = super().read(name, slices)
        type(self).read_bytes += found.nbytes
        return found


@pytest.mark.parametrize("form", ["gptq", "gptq, act-order", "awq", "fp8 in blocks", "compressed, 8 bits, zeros"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_reads_its_share(tmp_path, monkeypatch, form, dim):
    config, store = FORMS[form]
    source = write_tiny("llama", tmp_path / "source", hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    quantized.write_quantized(source, tmp_path / "model", config, store)
    monkeypatch.setattr("nxd_infer.hugging_face.weights.SafetensorsSource", Counting)
    found, name = stored_weights(tmp_path / "model"), "model.layers.0.mlp.up_proj.weight"
    size = found.shape(name)[dim]
    taken = []
    for part in (slice(0, size), slice(size // 4, size // 2)):
        Counting.read_bytes = 0
        found.read(name, [part if d == dim else slice(None) for d in (0, 1)])
        taken.append(Counting.read_bytes)
    groups_of_any = form == "gptq, act-order" and dim == 1  # an input's group may be any, so all scales are read
    assert taken[1] <= taken[0] * (0.45 if groups_of_any else 0.27), taken


@pytest.mark.parametrize("place", ["compression_config", "text_config.quantization_config", "a file"])
def test_the_form_is_found_wherever_it_is_told(tmp_path, place):
    config, store = FORMS["compressed, 4 bits"]
    source, path = write_tiny("llama", tmp_path / "source", **SIZES), tmp_path / "model"
    _, values = quantized.write_quantized(source, path, config, store)
    raw = json.loads((path / "config.json").read_text())
    if place != "a file":
        inside, _, name = place.rpartition(".")
        moved = {name: raw.pop("quantization_config")}
        raw |= {inside: moved} if inside else moved
        (path / "config.json").write_text(json.dumps(raw))
        assert name not in json.dumps(dequantized(raw))
    found = stored_weights(path / "model.safetensors" if place == "a file" else path)
    assert set(found.keys()) == set(values)
    assert torch.equal(found.read(f"{UP}.weight"), values[f"{UP}.weight"])
    broken = json.dumps(raw).replace('"pack-quantized"', '"other"')
    (path / "config.json").write_text(broken)
    with pytest.raises(ModelConfigError, match=f"{place if place != 'a file' else 'quantization_config'}.format = "):
        stored_weights(path / "model.safetensors")


@pytest.mark.parametrize("beside", [{}, {"quantization_config": FP8}])
def test_experts_in_one_tensor_are_not_read_without_their_scales(tmp_path, beside):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (tmp_path / "config.json").write_text(json.dumps(beside))
    tensors = {name: torch.ones(2, 4, 4).to(quantized.FP8), f"{name}_scale_inv": torch.ones(2, 1, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} is stored as torch\.float8_e4m3fn, which config"):
        weights(tmp_path)


@pytest.mark.parametrize("form", ["gptq", "awq", "fp8 in blocks", "fp8, a scale per weight", "compressed, 4 bits"])
def test_quantised_weights_are_refused_without_a_configuration(tmp_path, form):
    path = damaged(tmp_path, form, dict)
    raw = json.loads((path / "config.json").read_text())
    (path / "quantize_config.json").write_text(json.dumps(raw.pop("quantization_config")))
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"weight.* is stored as .*without a quantization_config; a quantize_"):
        weights(path)


@pytest.mark.parametrize("dtype", [torch.int8, quantized.FP8])
def test_eight_bits_are_plain_only_with_the_scale_that_our_layers_read(tmp_path, dtype):
    tensors = {"up.weight": torch.ones(2, 2).to(dtype), "mask": torch.ones(2, dtype=torch.uint8)}
    tensors |= {"weight_scale": torch.ones(1), "turn": torch.ones(2, dtype=torch.complex64)}  # the latter is not read
    save_file({**tensors, "up.scale": torch.ones(2, 1)}, tmp_path / "ours.safetensors")
    assert stored_weights(tmp_path / "ours.safetensors").read("up.weight").dtype is dtype
    save_file({**tensors, "up.weight_scale": torch.ones(2, 1)}, tmp_path / "theirs.safetensors")
    with pytest.raises(CheckpointError, match=r"up\.weight is stored as"):
        stored_weights(tmp_path / "theirs.safetensors")


def with_config(path: Path, **quantization: object) -> Path:
    path.mkdir(exist_ok=True)
    config = json.loads((write_tiny("llama", path, num_hidden_layers=1) / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return path


def group(**changes):
    config = compressed_config(4)
    config["config_groups"]["group_0"] |= changes
    return config


WEIGHTS = compressed_config(4)["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("quantization", "problem"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"quant_method = 'bitsandbytes'.*dequantize\(\)"),
        ({"load_in_8bit": True}, r"quant_method = 'bitsandbytes'"),
        *(({"quant_method": m}, f"quant_method = '{m}'") for m in ("hqq", "aqlm", "torchao", "mxfp4", "quanto")),
        ({"bits": 4}, r"quant_method = None: only weights of gptq, awq, compressed-tensors, fp8"),
        ({**GPTQ, "bits": 3}, r"quantization_config\.bits = 3: Input should be 2, 4 or 8"),
        ({**GPTQ, "group_size": "128"}, r"group_size = '128': Input should be a valid integer"),
        ({**GPTQ, "checkpoint_format": "marlin"}, r"checkpoint_format = 'marlin': Input should be 'gptq' or"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format = True"),
        (
            {**GPTQ, "dynamic": {r"+:.*down.*": {"bits": 8}}},
            r"dynamic.* = '\+:.*down.*': String should match pattern '\^-:'",
        ),
        ({**AWQ, "version": "gemv"}, r"version = 'gemv': Input should be 'gemm'"),
        ({**AWQ, "bits": 8}, "bits = 8: Input should be 4"),
        ({**AWQ, "zero_point": False}, "zero_point = False"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size = \[128\]: List should have at least 2"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
        (
            {**compressed_config(4), "format": "nvfp4-pack-quantized"},
            r"quantization_config\.format = 'nvfp4-pack-quantized'",
        ),
        ({**compressed_config(4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "format = 'sparse-24-bitmask'"),
        ({**compressed_config(4), "transform_config": {"config_groups": {"u": {}}}}, "transform_config = "),
        (group(weights={**WEIGHTS, "num_bits": 3}), r"group_0\.weights\.num_bits = 3"),
        (group(weights={**WEIGHTS, "strategy": "tensor_group"}), "strategy = 'tensor_group'"),
        (group(targets=["re:("]), r"group_0\.targets\.0 = 're:\(': Input should be a valid reg"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, quantization, problem):
    path = with_config(tmp_path / "model", **quantization)
    with pytest.raises(ModelConfigError, match=rf"config\.json: quantization_config.*{problem}|{problem}"):
        load_config(path)
    with pytest.raises(ModelConfigError, match=problem):
        weights(path)


def damaged(tmp_path: Path, form: str | tuple, change) -> Path:
    config, store = FORMS[form] if isinstance(form, str) else form
    path = tmp_path / "model"
    quantized.write_quantized(write_tiny("llama", tmp_path / "source", **SIZES), path, config, store)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("form", "change", "problem"),
    [
        (
            "gptq in 8 bits",
            lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"][1:]}),
            r"up_proj\.qweight: its shape",
        ),
        ("gptq", lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"].long()}), r"up_proj\.qweight: it is int64"),
        (
            "fp8 in blocks",
            lambda t: t.update({f"{UP}.weight_scale_inv": t[f"{UP}.weight_scale_inv"].byte()}),
            r"weight_scale_inv: it is uint8",
        ),
        (
            "compressed, 4 bits, act-order",
            lambda t: t.update({f"{UP}.weight_g_idx": t[f"{UP}.weight_g_idx"][1:]}),
            r"g_idx: its shape is \[127\], expected \[128\]",
        ),
        ("gptq", lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"][None]}), r"\[1, 16, 256\], expected a matrix"),
        ("gptq", lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"].flatten()}), r"up_proj\.q.*: its shape is"),
        ("gptq", lambda t: t.pop(f"{UP}.scales"), r"no tensor '.*up_proj\.scales'"),
        (
            "awq",
            lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"][:3]}),
            r"up_proj\.scales: its shape is \[3, 256\]",
        ),
        ("awq", lambda t: t.update({"model.act.scales": torch.ones(3)}), r"act\.scales: activations are not divided"),
        ("fp8 in blocks", lambda t: t.pop(f"{UP}.weight_scale_inv"), r"up_proj\.weight is stored as torch\.float8"),
        (
            "compressed, 4 bits",
            lambda t: t.pop(f"{UP}.weight_scale"),
            r"up_proj\.weight_packed is stored as torch\.int32",
        ),
    ],
)
def test_files_that_do_not_fit_their_configuration_are_named(tmp_path, form, change, problem):
    with pytest.raises(CheckpointError, match=problem):
        weights(damaged(tmp_path, form, change))


@pytest.mark.parametrize(("size", "read"), [(64, False), (-1, True), (128, True)])
def test_act_order_without_an_index_is_read_only_where_there_is_one_group(tmp_path, size, read):
    form = {**GPTQ, "desc_act": True, "group_size": size}, quantized.gptq(size=size)
    path = damaged(tmp_path, form, lambda t: t.pop(f"{UP}.g_idx"))
    if read:
        weights(path)
        return
    with pytest.raises(CheckpointError, match=r"up_proj\.qweight: desc_act is true, and it has no g_idx"):
        weights(path)


def test_a_group_that_is_not_there_is_named(tmp_path):
    path = damaged(tmp_path, "gptq", lambda t: t[f"{UP}.g_idx"].fill_(9))
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx: it names the groups 9 to 9, of 4"):
        weights(path).read(f"{UP}.weight")
