"""T5 against transformers: logits, tokens and penalties of `generate`; traced, verified, in an engine."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from nxd_infer import trace
from nxd_infer.cli import verify
from nxd_infer.context import make_context, use_context
from nxd_infer.errors import ArtifactError, ModelConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_infer.hugging_face.weights import StoredSource
from nxd_infer.layout import DictSource
from nxd_infer.runtime.load import load_artifact
from nxd_models import registry
from nxd_models.check_family import check_family
from nxd_models.serving import tasks
from nxd_models.serving.eager_generation import generate_eager
from nxd_models.t5.family import T5
from nxd_server import LLM, SamplingParams
from nxd_server.errors import RequestError
from nxd_server.text.tokenizer import Tokenizer
from tests.support.e2e.command import here
from tests.support.models.helpers import GAP, assert_greedy, prompts_of, relative_difference
from tests.support.tiny_models import EOS, VOCAB_SIZE, write_tokenizer

BUCKET, MAX_LEN, NEW = 8, 40, 6
LENGTHS = (1, BUCKET - 1, BUCKET, BUCKET + 1, MAX_LEN - NEW)
START = 3
FIELDS = {
    **{"vocab_size": VOCAB_SIZE, "d_model": 24, "d_kv": 8, "d_ff": 30, "num_layers": 2, "dropout_rate": 0.0},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    **{"decoder_start_token_id": START, "eos_token_id": EOS, "pad_token_id": 0},
}
CASES = {
    "tied, relu": {"num_heads": 4},
    "tied, gated": {"num_heads": 3, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu"},
    "untied, gated": {"num_heads": 3, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "shared head, not scaled": {"num_heads": 4, "tie_word_embeddings": False},
}
NO_END = {"bias_ids": EOS, "bias_values": [[-1e9] + [0.0] * 299] * len(LENGTHS)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Writes a model as transformers saves it, with weights large enough for the likeliest token to be clear."""
    root = tmp_path_factory.mktemp("t5")

    @functools.cache
    def write(name: str) -> Path:
        torch.manual_seed(1)
        config = transformers.T5Config(**FIELDS, **CASES[name])
        model = transformers.T5ForConditionalGeneration(config)
        if name.startswith("untied"):
            model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB_SIZE, config.d_model))
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn_like(weight)
                weight.copy_(noise * 0.4 if weight.dim() > 1 else 1 + noise * 0.1)
        path = root / name.replace(", ", "_").replace(" ", "_")
        model.save_pretrained(path)
        write_tokenizer(path)
        return path

    return write


@functools.cache
def whole(path: Path):
    return transformers.T5ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def generated(path: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Tokens of ``generate``, and how clear each is. Without a cache: transformers 5 has too short a one for models
    with more layers in the decoder than in the encoder."""
    output = whole(path).generate(
        torch.tensor([prompt]),
        **{"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "use_cache": False},
        **{"output_scores": True, "return_dict_in_generate": True},
    )
    best = [scores.topk(2).values[0] for scores in output.scores]
    return output.sequences[0, 1:].tolist(), [float(two[0] - two[1]) for two in best]


@functools.cache
def expected(path: Path) -> list[tuple[list[int], list[int], list[float]]]:
    """For each length: a prompt, the tokens of ``generate``, and how clear they are."""
    return [(p, *generated(path, p)) for p in prompts_of(LENGTHS, VOCAB_SIZE, seed=4)]


def plan_of(path: Path, **options):
    sizes = {"batch_sizes": [len(LENGTHS)], "prompt_buckets": [BUCKET], "max_len": MAX_LEN}
    return tasks.plan(path, dtype=torch.float32, **{**sizes, **options})


def step_of(path: Path, **options):
    plan = plan_of(path, **options)
    return hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())


# --- the module and its step, eagerly ----------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_are_those_of_transformers(directory, name):
    path = directory(name)
    check_family(path, 2)
    generator = torch.Generator().manual_seed(0)
    prompts, answers = (torch.randint(5, VOCAB_SIZE, (2, n), generator=generator) for n in (30, 25))
    mask = (torch.arange(30) < torch.tensor([[30], [17]])).long()
    wanted = whole(path)(input_ids=prompts, attention_mask=mask, decoder_input_ids=answers).logits
    assert relative_difference(registry.load_model(path)(prompts, answers, mask), wanted) < 1e-5
    found = generate_eager(step_of(path), [prompt for prompt, *_ in expected(path)], NEW, **NO_END)
    for result, (_, tokens, gaps) in zip(found, expected(path), strict=True):
        assert_greedy(result.tokens, tokens, gaps)


@torch.no_grad()
@pytest.mark.parametrize(("name", "value"), [("repetition_penalty", 1.8), ("frequency_penalty", 2.0)])
def test_penalties_count_the_answer_and_the_token_before_it_but_not_the_prompt(directory, name, value):
    path = directory("untied, gated")
    prompts = [prompt for prompt, *_ in expected(path)]
    found = generate_eager(step_of(path), prompts, NEW, **{name: value}, **NO_END)
    changed = 0
    for prompt, result, (_, plain, _) in zip(prompts, found, expected(path), strict=True):
        tokens, gaps = [], []
        for _ in range(NEW):
            fed = torch.tensor([[START, *tokens]])
            logits = whole(path)(input_ids=torch.tensor([prompt]), decoder_input_ids=fed).logits[0, -1]
            if name == "repetition_penalty":
                seen = logits[fed[0]]
                logits[fed[0]] = torch.where(seen > 0, seen / value, seen * value)
            else:
                logits -= value * torch.bincount(fed[0, 1:], minlength=VOCAB_SIZE)
            logits[EOS] = -1e9
            best = logits.topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
        assert_greedy(result.tokens, tokens, gaps)
        changed += tokens != plain
    assert changed


# --- traced ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def artifact(directory, tmp_path_factory) -> Path:
    """With graphs that verify guesses, which greedy answers do not change by."""
    path = tmp_path_factory.mktemp("t5") / "artifact"
    plan = plan_of(directory("untied, gated"), prompt_buckets=[MAX_LEN], speculate=2)
    trace.parallel_model_trace(**plan.trace_arguments(), tp_degree=2, backend="eager", artifact_dir=path)
    return path


@torch.no_grad()
@pytest.mark.parametrize("speculate", [0, 2])
def test_it_generates_for_several_at_once_with_log_probabilities_and_stops(directory, artifact, speculate):
    path = directory("untied, gated")
    decode = Tokenizer.from_dir(path).decode
    prompts = [prompt for prompt, *_ in expected(path)]
    greedy = {"max_tokens": NEW, "temperature": 0.0, "logit_bias": {EOS: -100}}
    stop = decode(expected(path)[3][1][2:3])
    with LLM(artifact, speculate=speculate) as llm:
        answers = llm.generate(prompts, SamplingParams(**greedy, logprobs=2))
        (cut,) = llm.generate(prompts[3:4], SamplingParams(**greedy, stop=[stop]))[0].outputs
        sampled = [llm.generate(prompts[k:], SamplingParams(max_tokens=NEW, seed=5))[0] for k in (0, 0, 2)]
        with pytest.raises(RequestError, match=f"{MAX_LEN}"):
            llm.generate([[5] * (MAX_LEN + 1)])
    for answer, (prompt, tokens, gaps) in zip(answers, expected(path), strict=True):
        assert min(gaps) > GAP, "choose a prompt whose answer is clear"
        (found,) = answer.outputs
        assert list(found.token_ids) == tokens and found.text == decode(tokens)
        fed = torch.tensor([[START, *tokens[:-1]]])
        logits = whole(path)(input_ids=torch.tensor([prompt]), decoder_input_ids=fed).logits
        wanted = logits.log_softmax(-1)[0, torch.arange(NEW), torch.tensor(tokens)]
        torch.testing.assert_close(torch.tensor([one.logprob for one in found.logprobs]), wanted, atol=1e-4, rtol=1e-4)
    assert cut.finish_reason == "stop" and cut.text == decode(expected(path)[3][1]).split(stop)[0]
    first, again, other = (one.outputs[0].token_ids for one in sampled)
    assert first == again != other


def test_it_is_verified_and_refused_by_a_version_that_may_cut_prompts(directory, artifact, monkeypatch):
    assert verify.run(artifact, directory("untied, gated"), None, seed=0) == 0
    monkeypatch.setattr("nxd_infer.artifact.reader.KNOWN_REQUIREMENTS", frozenset({"pipeline"}))
    with pytest.raises(ArtifactError, match=r"requires .*whole-prompts"):
        load_artifact(artifact)


# --- limits, refusals, files -------------------------------------------------------------------------------


def test_the_command_tells_that_prompts_are_read_whole(directory, tmp_path):
    path, sizes = directory("tied, relu"), ("--max-len", MAX_LEN, "--prompt-buckets", BUCKET)
    done = here("trace", path, "--out", tmp_path / "a", "--plan-only", *sizes)
    assert done.status == 0 and "note: prompts are read whole" in done.out, done


def test_without_a_length_it_is_traced_for_twice_what_it_was_trained_for(directory, tmp_path):
    path = directory("tied, relu")
    assert tasks.plan(path).metadata["max_len"] == 1024
    raw = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "n_positions": 50}))
    plan = tasks.plan(tmp_path, prompt_buckets=[16])
    assert plan.metadata["max_len"] == 100 and plan.metadata["prompt_buckets"] == [16, 100]
    assert plan.bucket_names == ["decode_b1", "decode_b4", "prefill_s16", "prefill_s100"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feed_forward_proj": "gated-mish", "dense_act_fn": None}, "feed_forward_proj = .gated-mish.: this act"),
        ({"decoder_start_token_id": None}, "the field decoder_start_token_id is missing"),
        ({"decoder_start_token_id": VOCAB_SIZE}, f"the vocabulary has {VOCAB_SIZE} tokens"),
        ({"relative_attention_num_buckets": 6}, "expected a multiple of 4"),
        ({"relative_attention_max_distance": 4}, "expected more than 4"),
        ({"architectures": ["T5EncoderModel"]}, r"architectures = \['T5EncoderModel'\] cannot do"),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(directory, tmp_path, changes, words):
    raw = json.loads((directory("tied, relu") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(ModelConfigError, match=words):
        tasks.plan(tmp_path)


def test_adapters_pipelines_and_transformers_own_module_are_refused(directory):
    path = directory("tied, relu")
    with pytest.raises(ModelConfigError, match="lora_slots = 1: a model with an encoder has no slots for adapters"):
        plan_of(path, lora_slots=1, lora_targets=["q"])
    with pytest.raises(ModelConfigError, match="encoder-decoder models are not served"):
        plan_of(path, model_impl="transformers")
    plan = plan_of(path)
    words = "t5: a model with an encoder has no pipeline stages"
    with use_context(make_context(2, pp=2)), torch.device("meta"), pytest.raises(ModelConfigError, match=words):
        plan.func(**plan.func_kwargs)


def test_a_head_is_written_under_its_own_name(directory):
    for name, head in (("untied, gated", True), ("shared head, not scaled", False)):
        path = directory(name)
        stored = load_file(path / "model.safetensors")
        assert ("lm_head.weight" in stored) == head
        weights = registry.load_model(path).state_dict()
        assert torch.equal(weights["lm_head.weight"], stored["lm_head.weight" if head else "shared.weight"])
        written = StoredSource(DictSource(weights), T5.stored_weights)
        assert {"lm_head.weight", "shared.weight"} <= set(written.keys())
        assert torch.equal(written.read("lm_head.weight"), weights["lm_head.weight"])
