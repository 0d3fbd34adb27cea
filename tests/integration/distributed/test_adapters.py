"""LoRA of PEFT on parallelized models, made before and after: gradients and logits of the whole model with adapters."""

from __future__ import annotations

import itertools
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.checkpoint import consolidate_checkpoint
from nxd_infer.context import current_context
from nxd_infer.distributed.adapters import adapted_layers
from nxd_infer.errors import AdapterError, ParallelConfigError
from nxd_infer.layout import shard_tensor, weight_layout
from tests.integration.distributed.test_apply import NEAR, run, wrong_gradients
from tests.support.distributed.models import CASES, LOOSE, Case
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
SEPARATE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "llama": [*SEPARATE, "lm_head"],
    **dict.fromkeys(("qwen3", "gemma2"), SEPARATE),
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "bert": ["query", "key", "value", "dense"],  # with whole layers
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neo": ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "opt": ["k_proj", "out_proj", "fc1", "fc2"],
    "t5": ["q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"],
}
LLAMA = Case("llama", 3, 1, LOOSE)
EACH = [LLAMA, *{case.kind: case for case in CASES if case.kind in TARGETS and case.kind != "llama"}.values()]
"""One case of each type whose layers are not another's."""
FEW = [case for case in EACH if case.kind in ("llama", "gpt2", "opt")]


def config(case: Case, **options: Any) -> Any:
    import peft

    return peft.LoraConfig(r=4, target_modules=TARGETS[case.kind], fan_in_fan_out=case.kind == "gpt2", **options)


def adapted(case: Case, make: Any, options: Any = None) -> nn.Module:
    """A model with adapters whose second factors are not zero."""
    plain = case.build()
    torch.manual_seed(2)
    model = make(plain, options or config(case))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    return model


def parallel_before(case: Case, whole: nn.Module, **options: Any) -> nn.Module:
    import peft

    return parallelize(adapted(case, peft.get_peft_model), **options)


def parallel_after(case: Case, whole: nn.Module, **options: Any) -> nn.Module:
    model = parallelize(case.build(), **options)
    torch.manual_seed(2 + 100 * current_context().rank)  # the first rank's are used
    model = nxd.distributed.get_peft_model(model, config(case))
    tp, values = current_context().tp, dict(whole.named_parameters())
    for name, layout in weight_layout(model).items():
        if "lora_B" in name:
            with torch.no_grad():
                model.get_parameter(name).copy_(shard_tensor(values, layout.rank_layout(tp.degree, tp.rank)))
    return model


def parallelize(model: nn.Module, **options: Any) -> nn.Module:
    return nxd.distributed.ParallelizersManager.parallelizer_for_model(model).parallelize(model, **options)


def wrong(case: Case, make: Any, **options: Any) -> list[str]:
    import peft

    whole = adapted(case, peft.get_peft_model)
    model = make(case, whole, **options)
    logits, _ = run(whole, case.batch())
    own_logits, _ = run(model, case.batch())
    found = [] if torch.allclose(own_logits, logits, **NEAR) else ["logits differ"]
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    if trained != [name for name, weight in whole.named_parameters() if weight.requires_grad]:
        found.append(f"trains {trained}")
    return found + wrong_gradients(*without_frozen(model, whole))


def without_frozen(*models: nn.Module) -> tuple[nn.Module, ...]:
    """Frozen weights have no gradient to compare."""
    for weight in itertools.chain(*(model.parameters() for model in models)):
        weight.grad = weight.grad if weight.requires_grad else torch.zeros_like(weight)
    return models


def compare() -> list[str]:
    found = []
    for case in EACH:
        ways = [(parallel_before, True), (parallel_after, False)]
        ways += [(parallel_after, True)] if case in FEW else []
        for make, enabled in ways:
            what = f"{case.kind} {make.__name__} sequence_parallel={enabled}"
            try:
                found += [f"{what}: {one}" for one in wrong(case, make, sequence_parallel_enabled=enabled)]
            except Exception:
                found.append(f"{what}: {traceback.format_exc()}")
    return found


def test_adapters_before_and_after():
    for rank, found in enumerate(run_ranks(compare, 2, comm_timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:6])


def biased() -> list[str]:
    """Biases of second factors, and modules to save, whose gradient is not that of the whole sequence."""
    import peft

    found = []
    ways = [(case, {"lora_bias": True}, ("lora_B", "bias")) for case in FEW[1:]]
    ways += [(LLAMA, {"modules_to_save": ["input_layernorm"]}, ("modules_to_save",))]
    for case, options, words in ways:
        whole = peft.get_peft_model(case.build(), config(case, **options))
        model = parallelize(case.build(), sequence_parallel_enabled=True)
        model = nxd.distributed.get_peft_model(model, config(case, **options))
        for one in (whole, model):
            run(one, case.batch())
        wrong_ones = wrong_gradients(*without_frozen(model, whole))
        found += [f"{case.kind}: {one}" for one in wrong_ones if all(word in one for word in words)]
    return found


def test_what_stays_whole_sees_the_whole_sequence():
    """Biases of factors, and modules to save."""
    for rank, found in enumerate(run_ranks(biased, 2)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:6])


def named(folder: Path) -> float:
    """How far the logits of a lazily loaded model are from the files', with a module to save in a named adapter."""
    import peft
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    options = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with nxd.distributed.lazy_load_for_parallelism(tensor_parallel_size=2):
        lazy = peft.get_peft_model(load(folder), options, adapter_name="mine")
    model, whole = parallelize(lazy).eval(), load(folder)
    with torch.no_grad():
        return float((model(**LLAMA.batch()).logits - whole(**LLAMA.batch()).logits).abs().max())


def test_a_module_to_save_of_any_adapter_begins_with_the_files_weights(tmp_path: Path):
    LLAMA.build().save_pretrained(tmp_path)
    assert max(run_ranks(named, 2, tmp_path)) < 1e-4


def saved(folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of a lazily loaded model whose adapter does nothing yet, and of models saved in ``folder``."""
    import peft
    import transformers

    with nxd.distributed.lazy_load_for_parallelism(tensor_parallel_size=2):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole", attn_implementation="eager")
    lazy = parallelize(peft.get_peft_model(model, config(LLAMA)))
    assert not any(weight.is_meta for weight in lazy.parameters())
    first = next(w for n, w in lazy.named_parameters() if "lora_A" in n)
    second = next(w for n, w in lazy.named_parameters() if "lora_B" in n)
    assert first.std() > 0 and not second.any()

    with_embedding = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    models = {
        "linear": parallelize(adapted(LLAMA, peft.get_peft_model)),
        "embedding": parallelize(adapted(LLAMA, peft.get_peft_model, with_embedding), parallelize_embeddings=False),
        # PEFT changes the base when it makes this adapter: the base must not be changed again
        "pissa": parallelize(peft.get_peft_model(LLAMA.build(), config(LLAMA, init_lora_weights="pissa"))),
    }
    for name, model in models.items():
        nxd.distributed.Parallelizer.save_model_sharded_checkpoint(model, folder / name)
    later = nxd.distributed.get_peft_model(parallelize(LLAMA.build()), config(LLAMA))
    linear: Any = models["linear"]
    for half in (linear, linear.get_base_model(), parallelize(LLAMA.build()), later):
        with pytest.raises(ParallelConfigError, match=r"save_model_sharded_checkpoint.* ckpt consolidate DIR --out"):
            half.save_pretrained(folder / "half")  # pyright: ignore
    with torch.no_grad():
        logits = {name: model.eval()(**LLAMA.batch()).logits for name, model in models.items()}
        return lazy.eval()(**LLAMA.batch()).logits, logits


def test_adapters_are_saved_and_loaded_by_peft(tmp_path: Path):
    import peft
    import transformers

    LLAMA.build().save_pretrained(tmp_path / "whole")
    plain, adapted_ones = run_ranks(saved, 2, tmp_path, comm_timeout=120)[0]
    for name, logits in adapted_ones.items():
        out = tmp_path / f"{name}-consolidated"
        consolidate_checkpoint(tmp_path / name, out)
        whole = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            assert torch.allclose(whole(**LLAMA.batch()).logits, plain, **NEAR) == (name != "pissa"), name
            loaded = peft.PeftModel.from_pretrained(whole, out / "adapter/default")
            assert torch.allclose(loaded(**LLAMA.batch()).logits, logits, **NEAR), name


def refused() -> list[str]:
    import peft

    case = LLAMA
    texts = []
    for make in (
        lambda: parallelize(peft.get_peft_model(case.build(), config(case, use_dora=True))),
        lambda: parallelize(peft.get_peft_model(case.build(), config(case, kasa_config=peft.KasaConfig()))),
        lambda: parallelize(peft.get_peft_model(case.build(), peft.LoraConfig(target_modules=["embed_tokens"]))),
        lambda: nxd.distributed.get_peft_model(parallelize(case.build()), peft.IA3Config(target_modules=["k_proj"])),
        lambda: nxd.distributed.get_peft_model(parallelize(case.build()), config(case, init_lora_weights="pissa")),
    ):
        with pytest.raises(AdapterError) as error:
            make()
        texts.append(str(error.value))
    plain = peft.LoraConfig(r=4, target_modules=["c_fc"])
    model = nxd.distributed.get_peft_model(parallelize(FEW[1].build()), plain)
    assert FEW[1].kind == "gpt2" and all(layer.fan_in_fan_out for _, layer in adapted_layers(model))
    return texts


def test_adapters_that_cannot_be_split_are_refused():
    dora, kasa, embedding, other, pissa = run_ranks(refused, 2)[0]
    assert "init_lora_weights='pissa' needs the whole weights" in pissa
    assert "use_dora=False" in dora and "KasaLinearVariant cannot be split" in kasa
    assert "parallelize_embeddings=False" in embedding
    assert "IA3Config" in other
