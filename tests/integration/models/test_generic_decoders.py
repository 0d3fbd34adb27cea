"""Decoders in transformers' own modules, and our GPT-NeoX: traced, verified, served, with the tokens of `generate`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

from nxd_infer.cli import verify
from nxd_infer.distributed import plan_registry
from nxd_infer.errors import MissingPackageError, ModelConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_infer.trace import parallel_model_trace
from nxd_models import registry
from nxd_models.check_family import check_family
from nxd_models.generic import attention
from nxd_models.serving import tasks
from nxd_models.serving.eager_generation import generate_eager
from nxd_server.text.tokenizer import Tokenizer
from tests.support.distributed.models import Case
from tests.support.http.http_artifacts import real_server
from tests.support.models.helpers import (
    GAP,
    assert_greedy,
    greedy_reference,
    prompts_of,
    reference,
    relative_difference,
    without_mixed,
)
from tests.support.tiny_models import EOS, FAMILIES, VOCAB_SIZE, write_tiny, write_tokenizer

BUCKET, MAX_LEN, NEW = 8, 40, 4
LENGTHS = (1, BUCKET - 1, BUCKET, BUCKET + 1, MAX_LEN - NEW)
NO_END = {"bias_ids": EOS, "bias_values": [[-1e9] + [0.0] * 299] * len(LENGTHS)}
WINDOW = {"sliding_window": 6}
CASES = {
    "llama": Case("llama", 4, 2),
    "llama, padded and tied": Case("llama", 3, 1, {"tie_word_embeddings": True}),
    "mistral": Case("mistral", 4, 1, WINDOW),
    "qwen2": Case("qwen2", 6, 2),
    "qwen3": Case("qwen3", 6, 3, {"head_dim": 8}),
    "phi3": Case("phi3", 4, 2, WINDOW),
    "gemma2": Case(
        "gemma2", 4, 2, {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5, **WINDOW}
    ),
    "gpt2": Case("gpt2", fields={"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt_neo": Case("gpt_neo", fields={"window_size": 6}),
    "gpt_neox": Case("gpt_neox", fields={"rotary_pct": 0.5}),
    "opt": Case("opt", 3, 3),
    "our gpt_neox": Case("gpt_neox", 3, 3, {"rotary_pct": 0.5}),
    "our gpt_neox, serial": Case("gpt_neox", fields={"rotary_pct": 1.0, "use_parallel_residual": False}),
}
SLOW = {"opt"} if transformers.__version__ < "5" else set()
"""Models whose code in this release of transformers makes its masks itself."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Writes a model as transformers saves it, with weights large enough for the likeliest token to be clear."""
    root = tmp_path_factory.mktemp("generic")

    @functools.cache
    def write(name: str) -> Path:
        case = CASES[name]
        fields = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.3, **case.fields}
        path = root / name
        Case(case.kind, case.heads, case.kv, fields).build().save_pretrained(path)
        write_tokenizer(path)
        return path

    return write


@functools.cache
def expected(path: Path) -> list[tuple[list[int], list[int], list[float]]]:
    """For each length: a prompt, the tokens of ``generate``, and how clear they are."""
    return [(p, *greedy_reference(path, p, NEW)) for p in prompts_of(LENGTHS, VOCAB_SIZE, seed=3)]


def plan_of(path: Path):
    model_impl = None if path.name.startswith("our") else "transformers"
    sizes = {"batch_sizes": [len(LENGTHS)], "prompt_buckets": [BUCKET], "max_len": MAX_LEN}
    plan = tasks.plan(path, model_impl=model_impl, dtype=torch.float32, **sizes)
    assert plan.metadata.get("model_impl") == model_impl
    return plan


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_are_those_of_transformers(directory, name):
    path = directory(name)
    prompts = [prompt for prompt, *_ in expected(path)]
    if name.startswith("our"):
        check_family(path, 2)
    if name != "gemma2":  # whose logits have a cap in its eager attention alone
        model = registry.load_model(registry.load_config(path, None if name.startswith("our") else "transformers"))
        ids = torch.tensor([prompts[-1]])
        assert relative_difference(model(ids), reference(path, "CausalLM")(ids).logits) < 1e-5
    plan = plan_of(path)
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    assert ("makes a mask of its own" in plan.metadata.get("why_whole", "")) == (name in SLOW)
    found = generate_eager(step, prompts, NEW, piece=BUCKET, **NO_END)
    for result, (_, tokens, gaps) in zip(found, expected(path), strict=True):
        assert_greedy(result.tokens, tokens, gaps)


def told_by_verify(path: Path, artifact: Path, capsys, degree: int, plan=None) -> str | None:
    """The first output that differs, of an artifact that is traced now."""
    arguments = (plan or without_mixed(plan_of(path))).trace_arguments()
    parallel_model_trace(**arguments, tp_degree=degree, backend="eager", artifact_dir=artifact)
    capsys.readouterr()
    status = verify.run(artifact, path, None, seed=0)
    told = capsys.readouterr().out
    found = re.search(r"the first output that differs: (.*)", told)
    assert status == (found is not None) == ("docs/transformers.md" in told), told
    return found and found[1]


@pytest.mark.smoke
def test_it_is_traced_verified_and_served(directory, tmp_path, capsys):
    path, artifact = directory("gpt2"), tmp_path / "artifact"
    assert told_by_verify(path, artifact, capsys, 2, plan_of(path)) is None
    decode = Tokenizer.from_dir(path).decode
    with real_server(artifact) as server, concurrent.futures.ThreadPoolExecutor(len(LENGTHS)) as clients:

        def ask(prompt: list[int]) -> str:
            body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "logit_bias": {str(EOS): -100}}
            return server.post("/v1/completions", body).json()["choices"][0]["text"]

        prompts = [prompt for prompt, *_ in expected(path)]
        texts = list(clients.map(ask, prompts))
    for text, (_, tokens, gaps) in zip(texts, expected(path), strict=True):
        assert min(gaps) > GAP, "choose a prompt whose answer is clear"
        assert text == decode(tokens)


def test_a_plan_with_a_wrong_style_is_told(directory, tmp_path, monkeypatch, capsys):
    """What is joined in one weight is cut as if it were one thing, which fits every shape."""
    right = plan_registry.plan_of_type("gpt2")
    wrong = dataclasses.replace(right, styles={**right.styles, "h.*.attn.c_attn": "column"})
    monkeypatch.setitem(plan_registry._REGISTERED, "gpt2", wrong)
    assert told_by_verify(directory("gpt2"), tmp_path, capsys, 2) == "top_logprobs of prefill_s8"


def test_a_step_that_attends_wrongly_is_told(directory, tmp_path, monkeypatch, capsys):
    """It is compared with transformers' own attention, and not with the same step unsharded."""
    monkeypatch.setattr(attention, "visible", lambda step, allowed: None)
    assert told_by_verify(directory("mistral"), tmp_path, capsys, 1) == "top_logprobs of prefill_s8"


# --- what it cannot compute is refused by name, or limited ---------------------------------------------------------


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4, "long_factor": [4.0] * 4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(("kind", "rope", "longest"), [("phi3", LONG, 40), ("llama", YARN, 64)])
def test_rotary_positions_that_depend_on_the_length_are_limited_to_the_original_one(tmp_path, kind, rope, longest):
    fields = {"original_max_position_embeddings": 40} if kind == "phi3" else {}
    fields |= {"vocab_size": VOCAB_SIZE, "initializer_range": 0.3, "rope_parameters": rope}
    Case(kind, 4, 2, fields).build().save_pretrained(tmp_path)
    told = f"context of {longest + 1} tokens is beyond the {longest} of this {kind}"
    with pytest.raises(ModelConfigError, match=told):
        tasks.plan(tmp_path, model_impl="transformers", max_len=longest + 1)
    plan = tasks.plan(tmp_path, model_impl="transformers", max_len=longest, batch_sizes=[1], dtype=torch.float32)
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    (prompt,) = prompts_of([longest - NEW], VOCAB_SIZE)
    no_end = {"bias_ids": EOS, "bias_values": [[-1e9] + [0.0] * 299]}
    (found,) = generate_eager(step, [prompt], NEW, piece=BUCKET, **no_end)
    assert_greedy(found.tokens, *greedy_reference(tmp_path, prompt, NEW))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4), "BloomModel takes no position_ids"),
        (
            transformers.GptOssConfig(
                **{"hidden_size": 32, "intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
                **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
            ),
            "GptOssAttention: attention with s_aux",
        ),
        (transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4), "takes no position_ids"),
    ],
    ids=["bloom", "gpt_oss", "mamba"],
)
def test_a_state_that_no_cache_holds_is_computed_anew_from_the_text(tmp_path, config, why):
    config.vocab_size, config.initializer_range = VOCAB_SIZE, 0.3
    config.bos_token_id, config.eos_token_id = 1, EOS
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plan = tasks.plan(tmp_path, batch_sizes=[2], prompt_buckets=[BUCKET], max_len=MAX_LEN, dtype=torch.float32)
    assert why in plan.metadata["why_whole"]
    step = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    prompts = prompts_of([BUCKET + 1, 5], VOCAB_SIZE)
    ends = {"bias_ids": EOS, "bias_values": [[-1e9] + [0.0] * 299] * 2}
    found = generate_eager(step, prompts, NEW, piece=BUCKET, **ends)
    for result, prompt in zip(found, prompts, strict=True):
        assert_greedy(result.tokens, *greedy_reference(tmp_path, prompt, NEW))
    with pytest.raises(ModelConfigError, match=r"no tensor-parallel plan for model_type .*; without one, trace it for"):
        parallel_model_trace(**plan.trace_arguments(), tp_degree=2, backend="eager")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, r"model_type = 't5': encoder-decoder models are not served"),
        ({"model_type": "mambo"}, r"'mambo'.*known are llama, .*docs/models\.md"),
        (
            {**FAMILIES["bert"], "architectures": ["JinaBertModel"], "auto_map": {"AutoModel": "x--JinaBertModel"}},
            "no class 'JinaBertModel', and code of a directory is not run",
        ),
        (
            {**FAMILIES["bert"], "architectures": ["BertLMHeadModel"]},
            "is_decoder = None: attention to later tokens",
        ),
        (
            {"model_type": "gemma2", "num_hidden_layers": "two"},
            r"transformers cannot read this gemma2 model: ",
        ),
        (
            {**FAMILIES["llama"], "architectures": ["LlamaForSequenceClassification"], "pad_token_id": None},
            "pad_token_id = None",
        ),
        (
            {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention = True: attention to later tokens",
        ),
    ],
)
def test_what_is_not_served_is_refused(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelConfigError, match=message):
        registry.load_config(tmp_path, "transformers")


def test_without_transformers_the_error_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'nxd-infer\[hf\]'"):
        registry.load_config(tmp_path)
    registry.load_config(write_tiny("llama", tmp_path / "llama"))  # families of ours do not need it


def test_adapters_are_refused(tmp_path):
    path = write_tiny("llama", tmp_path / "llama")
    with pytest.raises(ModelConfigError, match="lora_slots = 1: a module of transformers has no slots for adapters"):
        tasks.plan(path, model_impl="transformers", lora_slots=1, lora_targets=["q_proj"])
