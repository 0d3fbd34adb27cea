"""The decoder family against Hugging Face transformers on the same seeded weights, in float32, at degree 1."""

import pytest
import torch

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_models import registry
from nxd_models.llama.family import LlamaStep
from nxd_models.serving import tasks
from nxd_models.serving.eager_generation import generate_eager
from tests.support.models.helpers import ODD, prompts_of, reference, relative_difference
from tests.support.tiny_models import DECODERS, MIXTURES, VOCAB_SIZE, write_tiny

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
VARIANTS = {
    **{family: (family, {}) for family in (*DECODERS, *MIXTURES)},
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": DYNAMIC, "max_position_embeddings": 16}),
    "llama-padding": ("llama", {"pad_token_id": 9}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-sizes": ("llama", {**ODD, "head_dim": 10}),
    "mixtral-balanced": (
        "mixtral",
        {"output_router_logits": True, "router_aux_loss_coef": 0.3, "tie_word_embeddings": True},
    ),
    "qwen3_moe-sparse-steps": (
        "qwen3_moe",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            "attention_bias": True,
            "output_router_logits": True,
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 64}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("decoders")
    return {name: write_tiny(family, root / name, **extra) for name, (family, extra) in VARIANTS.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_equal_transformers(directories, name):
    path = directories[name]
    theirs = reference(path, "CausalLM")
    ours = registry.load_model(path)
    ids = torch.tensor(prompts_of([24, 24], 280))
    ids[0, 7] = 9  # the token that pads in one variant
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    with torch.no_grad():
        assert relative_difference(ours(ids), theirs(ids).logits) < 1e-5
        found, expected = ours(ids, attention_mask=mask), theirs(ids, attention_mask=mask).logits
        live = mask.bool()
        assert relative_difference(found[live], expected[live]) < 1e-5
        assert found.isfinite().all()
    labels = ids.clone()
    labels[0, :5] = -100
    loss, logits = ours(ids, labels=labels)
    expected_loss = theirs(ids, labels=labels).loss
    assert abs(loss.item() - expected_loss.item()) < 1e-5 * expected_loss.item()
    assert logits.shape == theirs(ids).logits.shape
    loss.backward()
    theirs.zero_grad()
    expected_loss.backward()
    gradients = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None, key
        assert relative_difference(parameter.grad, gradients[key].grad) < 2e-5, key


@pytest.mark.parametrize("name", [*DECODERS, *MIXTURES, "llama-dynamic", "llama-odd-sizes"])
def test_a_prompt_in_pieces_at_offsets_equals_the_uncached_forward(directories, name):
    path = directories[name]
    spec = registry.load_config(path)
    plain = registry.load_model(path)
    max_len = min(48, spec.config.usual_length)
    prompts = prompts_of([min(length, max_len - 6) for length in (1, 10, 30)], 280, seed=2)
    for piece in (1, 8, None):
        step = spec.make("generate", torch.float32, step=True, slots=3, max_len=max_len)
        step = hf.load(step, registry.weights(path))
        results = generate_eager(step, prompts, 6, piece=piece, bias_ids=2, bias_values=[[-1e9] + [0.0] * 299] * 3)
        for prompt, result in zip(prompts, results, strict=True):
            with torch.no_grad():
                logits = plain(torch.tensor([prompt + result.tokens]))[0].double().log_softmax(-1)
            assert len(result.tokens) == 6
            for at, (token, logprob) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
                row = logits[len(prompt) + at - 1]
                allowed = row.index_fill(0, torch.tensor(2), -torch.inf)  # the end of the text is banned
                assert token == allowed.argmax().item()
                assert abs(logprob - row[token].item()) < 1e-5
                best = row.topk(20)
                assert list(result.top[at]) == best.indices.tolist()
                assert list(result.top[at].values()) == pytest.approx(best.values.tolist(), rel=1e-5, abs=1e-5)


def test_bfloat16_stays_close_to_transformers(directories):
    path = directories["qwen3"]
    ids = torch.tensor(prompts_of([24], VOCAB_SIZE))
    ours = registry.load_model(path, dtype=torch.bfloat16)
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert relative_difference(ours(ids).float(), theirs(ids).logits.float()) < 0.03
    converted = registry.load_model(path).to(torch.bfloat16)
    rotary = converted.model.layers[0].self_attn.rotary
    assert rotary.inv_freq.dtype == torch.float32, "frequencies are never rounded"


def test_a_context_beyond_the_model_is_refused_by_field(directories):
    spec = registry.load_config(directories["mistral-window"])
    assert spec.config.max_length == 64
    with pytest.raises(ModelConfigError, match=r"100 tokens .* sliding_window = 64.* at most 64"):
        LlamaStep(spec.config, slots=1, max_len=100)
    model = registry.build(spec)
    with pytest.raises(ModelConfigError, match="sliding_window"):
        model(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(ModelConfigError, match="max_position_embeddings = 256"):
        LlamaStep(registry.load_config(directories["llama"]).config, slots=1, max_len=257)


def test_padding_that_is_no_row_of_the_embedding_is_ignored(tmp_path):
    """transformers refuses it; serving needs no such row."""
    for value, row in ((VOCAB_SIZE, None), ("x", None), (-1, VOCAB_SIZE - 1), (9, 9)):
        model = registry.build(write_tiny("llama", tmp_path, pad_token_id=value))
        assert model.model.embed_tokens.padding_idx == row


def test_contexts_in_which_dynamic_rotary_positions_are_scaled_are_trained_and_not_served(directories):
    path = directories["llama-dynamic"]
    config = registry.load_config(path).config
    assert (config.max_length, config.usual_length) == (64, 16)
    with pytest.raises(ModelConfigError, match=r"17 tokens .* dynamic rotary .* max_len = 16 at most"):
        LlamaStep(config, slots=1, max_len=17)
    with pytest.raises(ModelConfigError, match=r"32 tokens .* max_len = 16 at most"):
        tasks.plan(path, max_len=32)
    assert tasks.plan(path, prompt_buckets=[8]).metadata["max_len"] == 16
