"""The programs of examples/ported, which use old names alone, give what plain PyTorch and transformers give."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from nxd_infer.compat.uses import uses_in
from tests.support.ported import EXAMPLES, run

SEED, BATCH, LENGTH, STEPS, WARMUP, RATE = 12349, 4, 32, 4, 2, 1e-3
SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CAUSAL: dict[str, Any] = {**SIZES, "intermediate_size": 64, "max_position_embeddings": 64}
LLAMA: dict[str, Any] = {**CAUSAL, "num_key_value_heads": 2}
OLD = ("neuronx_distributed", "torch_neuronx", "torch_xla")
NO_DECAY = ("bias", "norm", "LayerNorm")


def numbers(shown: str, kind: str) -> list[float]:
    (line,) = re.findall(rf"^{kind} (.+)$", shown, re.MULTILINE)
    return [float(number) for number in line.split()]


def whole(model_cls: Any, config: Any) -> Any:
    torch.manual_seed(SEED)
    return model_cls(config)


# --- training -----------------------------------------------------------------------------------------


def batches() -> list[Tensor]:
    tokens = torch.tensor(list((EXAMPLES / "text.txt").read_bytes()))
    return list(tokens[: STEPS * BATCH * LENGTH].view(STEPS, BATCH, LENGTH))


def causal(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(any(part in name for part in NO_DECAY), param) for name, param in model.named_parameters()]
    kinds = ((False, 0.01), (True, 0.0))
    return [{"params": [p for bare, p in named if bare == kind], "weight_decay": decay} for kind, decay in kinds]


class OldAdamW(torch.optim.Optimizer):
    """That of older versions of transformers: epsilon before the bias correction, weight decay after the step."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999)):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                state, (beta1, beta2) = self.state[param], group["betas"]
                number = state["number"] = state.get("number", 0) + 1
                state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * param.grad
                state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * param.grad**2
                rate = group["lr"] * (1 - beta2**number) ** 0.5 / (1 - beta1**number)
                param -= rate * state["m"] / (state["v"].sqrt() + 1e-6)
                param *= 1 - group["lr"] * group["weight_decay"]


def trained(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Tensor, int], Tensor] = causal,
    grouped: bool = True,
    scheduled: bool = True,
    parts: int = 1,
    optimizer_cls: Any = torch.optim.AdamW,
    **options: Any,
) -> list[float]:
    """Train in one process; return the losses. ``parts``: data parallel ranks, each of which has its own loss."""
    parameters: Any = groups(model) if grouped else [param for param in model.parameters() if param.requires_grad]
    optimizer = optimizer_cls(parameters, lr=RATE, **options)
    losses = []
    for step, tokens in enumerate(batches()):
        factor = (step + 1) / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = RATE * (factor if scheduled else 1)
        losses_of = [loss_of(model.train(), tokens[part::parts], step) for part in range(parts)]
        loss = torch.stack(losses_of).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def masked(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
    places = torch.arange(LENGTH) % 5 == step % 5
    labels = torch.where(places, tokens, -100)
    inputs = torch.where(places, 1, tokens)
    return model(input_ids=inputs, labels=labels, next_sentence_label=tokens[:, 0] % 2).loss


@functools.cache
def llama(**options: Any) -> list[float]:
    return trained(whole(LlamaForCausalLM, LlamaConfig(**LLAMA)), **options)


@functools.cache
def bert() -> list[float]:
    config = BertConfig(**CAUSAL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return trained(whole(BertForPreTraining, config), masked, grouped=False, scheduled=False)


@functools.cache
def gpt_neox() -> list[float]:
    return trained(whole(GPTNeoXForCausalLM, GPTNeoXConfig(**CAUSAL)), scheduled=False)


@functools.cache
def mixtral(parts: int = 1) -> list[float]:
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    config = MixtralConfig(**{**LLAMA, "intermediate_size": 32}, **experts, output_router_logits=True)
    return trained(whole(MixtralForCausalLM, config), grouped=False, scheduled=False, parts=parts)


TRAINING: list[tuple[str, Callable[[], list[float]], list[tuple[int, str]]]] = [
    (
        "tp_zero1_llama_hf_pretrain.py",
        functools.partial(llama, optimizer_cls=OldAdamW, betas=(0.9, 0.95)),
        [(1, ""), (2, "--tp 2"), (2, "--tp 1"), (2, "--tp 2 --sequence_parallel_enabled 0 --use_flash_attention 0")],
    ),
    (
        "tp_pp_llama_hf_pretrain.py",
        llama,
        [(1, ""), (2, "--tp 2"), (2, "--pp 2"), (2, "--pp 2 --use_zero1_optimizer 1 --num_microbatches 4")],
    ),
    (
        "run_llama_nxd.py",
        functools.partial(llama, optimizer_cls=OldAdamW),
        [(1, ""), (2, "--tp 2"), (2, "--tp 1 --use_selective_checkpoint 0")],
    ),
    ("run_llama_nxd_ptl.py", functools.partial(llama, optimizer_cls=OldAdamW), [(1, ""), (2, "--tp 2")]),
    ("tp_dp_bert_hf_pretrain.py", bert, [(1, ""), (2, "--tp 2"), (2, "--tp 1")]),
    ("tp_dp_gpt_neox_hf_pretrain.py", gpt_neox, [(1, ""), (2, "--tp 2"), (2, "--tp 1")]),
    ("tp_mixtral_moe_hf_pretrain.py", mixtral, [(1, ""), (2, "--tp 2")]),
    ("tp_mixtral_moe_hf_pretrain.py", functools.partial(mixtral, parts=2), [(2, "--ep 2")]),
]


@pytest.mark.parametrize(
    ("program", "expected", "ranks", "options"),
    [
        pytest.param(program, expected, ranks, options, id=f"{program[:-3]} {ranks} {options}".strip())
        for program, expected, runs in TRAINING
        for ranks, options in runs
    ],
)
def test_losses_are_those_of_one_process(program: str, expected: Callable, ranks: int, options: str, tmp_path: Path):
    shown = run(tmp_path, ranks, program, *options.split())
    assert numbers(shown, "losses") == pytest.approx(expected(), rel=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("door", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]])
def test_both_doors(door: list[str], tmp_path: Path):
    """Real commands, as a user types them."""
    program, expected, _ = TRAINING[0]
    command = [sys.executable, *door, "-m", "nxd_infer.compat", EXAMPLES / program, "--tp", str(2 if door else 1)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers(done.stdout, "losses") == pytest.approx(expected(), rel=1e-5)


@pytest.mark.parametrize(("ranks", "options"), [(1, ""), (2, "--tp 2")])
def test_an_adapter_is_trained_as_peft_trains_it(ranks: int, options: str, tmp_path: Path):
    """From the adapter that the program has saved before its first step, over weights of the checkpoint converter."""
    from peft import PeftModel

    shown = run(tmp_path, ranks, "tp_llama_lora_finetune.py", *options.split())
    adapters = [tmp_path / "output" / tag / "lora_adapter" for tag in ("lora_0", "lora")]
    plain = whole(LlamaForCausalLM, LlamaConfig(**LLAMA))
    model = PeftModel.from_pretrained(plain, str(adapters[0]), is_trainable=True)
    expected = trained(model, grouped=False, scheduled=False)
    assert numbers(shown, "losses") == pytest.approx(expected, rel=1e-5)
    found = load_file(adapters[1] / "adapter_model.safetensors")
    state = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    assert found.keys() == state.keys()
    assert all(torch.allclose(found[name], state[name], rtol=1e-3, atol=1e-5) for name in state)


def test_checkpoints_are_converted_and_back(tmp_path: Path):
    state = whole(LlamaForCausalLM, LlamaConfig(**LLAMA)).state_dict()
    torch.save(state, tmp_path / "model.bin")
    common = ["--tp_size", 2, "--pp_size", 2, "--n_layers", 2, "--qkv_linear", "True", "--fuse_qkv", "True"]
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    given = ["--input_dir", "model.bin", "--output_dir", "ranks", "--convert_from_full_state"]
    run(tmp_path, 1, "convert_checkpoints.py", *given, *common)
    rank = torch.load(tmp_path / "ranks/model/dp_rank_00_tp_rank_01_pp_rank_01.pt", weights_only=True)
    gate_up = [state[f"model.layers.1.mlp.{name}_proj.weight"].chunk(2)[1] for name in ("gate", "up")]
    assert torch.equal(rank["model.layers.1.mlp.gate_up_proj.weight"], torch.cat(gate_up))
    given = ["--input_dir", "ranks/model", "--output_dir", "back.pt", "--convert_to_full_state"]
    run(tmp_path, 1, "convert_checkpoints.py", *given, *common, "--config", "config.json")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


# --- inference ----------------------------------------------------------------------------------------


def paraphrases() -> list[float]:
    options: dict[str, Any] = {**CAUSAL, "num_labels": 2}
    model = whole(BertForSequenceClassification, BertConfig(**options)).eval()
    texts = ("It does not matter.", "It does not matter how the work")
    return [x for text in texts for x in model(torch.tensor([list(text.encode())])).logits.flatten().tolist()]


def embeddings() -> list[float]:
    config = CLIPTextConfig(
        **{**CAUSAL, "max_position_embeddings": 32}, projection_dim=16, eos_token_id=2, bos_token_id=0, pad_token_id=1
    )
    input_ids = torch.full((2, 32), 2)
    for line, text in enumerate(("a river at dusk", "bread, and the measuring of fields")):
        letters = torch.tensor(list(text.encode())[:31])
        input_ids[line, : len(letters)] = letters
    return whole(CLIPTextModelWithProjection, config).eval()(input_ids).text_embeds.flatten().tolist()


def greedy(prompt: str, count: int, quantized: bool = False) -> list[float]:
    model = whole(LlamaForCausalLM, LlamaConfig(**LLAMA)).eval()
    for name, module in model.named_modules():
        if (
            quantized
            and isinstance(module, nn.Linear)
            and not any(one in name for one in ("lm_head", "q_", "k_", "v_"))
        ):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            module.weight.data = (module.weight / scale).round() * scale
    prompt_ids = torch.tensor([list(prompt.encode())])
    ids = prompt_ids
    for _ in range(count):
        shown = ids[:, -prompt_ids.shape[1] :] if quantized else ids
        ids = torch.cat([ids, model(shown).logits[:, -1:].argmax(-1)], 1)
    return ids[0, prompt_ids.shape[1] :].tolist()


INFERENCE: list[tuple[str, str, Callable[[], list[float]]]] = [
    ("tp_bert_inference.py", "logits", paraphrases),
    ("tp_clip_text_encoder.py", "embeddings", embeddings),
    ("inference_demo.py", "tokens", functools.partial(greedy, "It takes from the banks, a grain at ", 8)),
    ("model_builder_v2.py", "tokens", functools.partial(greedy, "It takes from the banks, a grain at ", 8)),
    (
        "quantized_llama_inference.py",
        "tokens",
        functools.partial(greedy, "It had wanted bread, and ", 8, quantized=True),
    ),
]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("program", "kind", "expected"), INFERENCE, ids=[program[:-3] for program, _, _ in INFERENCE])
@torch.no_grad()
def test_traced_models_answer_as_transformers(program: str, kind: str, expected: Callable, degree: int, tmp_path: Path):
    shown = run(tmp_path, 1, program, "--tp", degree)
    wanted = expected()
    found = numbers(shown, kind)
    assert found == (wanted if kind == "tokens" else pytest.approx(wanted, rel=1e-5, abs=1e-6))


# --- names --------------------------------------------------------------------------------------------


def test_at_least_sixty_old_names_and_none_of_ours():
    names: set[str] = set()
    for path in EXAMPLES.glob("*.py"):
        assert not re.search(r"(?<!-m )nxd_infer", path.read_text()), path
        names |= {use.name for use in uses_in(path, OLD) if use.name.count(".") > 0}
    assert len(names) >= 60, sorted(names)
