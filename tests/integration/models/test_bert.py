"""The BERT family against transformers on the same weights, also traced."""

import pytest
import torch

from nxd_infer.errors import BucketError, InputRangeError, ModelConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_infer.trace import parallel_model_trace
from nxd_models import registry
from nxd_models.bert import model as bert
from nxd_models.serving import tasks
from tests.support.models.helpers import prompts_of, reference, relative_difference
from tests.support.tiny_models import CLASSIFIERS, VOCAB_SIZE, write_tiny


def batch(pad: int, lengths=(23, 9, 1)):
    """Right-padded ids and mask [B, S]."""
    prompts = prompts_of(lengths, VOCAB_SIZE, seed=3)
    ids = torch.full((len(prompts), max(lengths)), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : len(prompt)] = 1
    return ids, mask


@pytest.mark.parametrize(
    ("family", "extra"),
    [("bert", {"num_attention_heads": 8, "intermediate_size": 50, "hidden_act": "gelu_new"}), ("roberta", {})],
)
def test_hidden_states_and_embeddings_equal_transformers(tmp_path, family, extra):
    path = write_tiny(family, tmp_path, **extra)
    spec = registry.load_config(path)
    ids, mask = batch(spec.config.pad_token_id)
    types = torch.zeros_like(ids)
    if family == "bert":
        types[:, 4:] = 1
    with torch.no_grad():
        expected = reference(path, "Model")(ids, attention_mask=mask, token_type_ids=types).last_hidden_state
        live = mask.bool()
        for pooling in ("mean", "cls", "max"):
            model = registry.load_model(path, "embed", pooling=pooling, normalize=False)
            hidden = bert.Encoder.forward(model, ids, mask, types)
            assert relative_difference(hidden[live], expected[live]) < 1e-5
            pooled = torch.stack([_pooled(h[m], pooling) for h, m in zip(expected, live, strict=True)])
            assert relative_difference(model(ids, mask, types), pooled) < 1e-5
        unit = registry.load_model(path, "embed", normalize=True)(ids, mask, types)
        torch.testing.assert_close(unit.norm(dim=-1), torch.ones(3))
        torch.testing.assert_close(model(torch.where(live, ids, 99), mask, types), model(ids, mask, types))
        assert model(ids, torch.zeros_like(mask), types).isfinite().all(), "a row that is all padding is finite"


def _pooled(hidden, pooling):
    return {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0)}[pooling]


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classification_equals_transformers(tmp_path, family):
    path = write_tiny(family, tmp_path)
    spec = registry.load_config(path)
    assert spec.tasks == ("classify", "embed")
    assert spec.config.labels == ("bad", "fair", "good")
    ids, mask = batch(spec.config.pad_token_id)
    model = registry.load_model(path)
    with torch.no_grad():
        expected = reference(path, "SequenceClassification")(ids, attention_mask=mask).logits
        assert relative_difference(model(ids, mask), expected) < 1e-5
        base = reference(path, "Model")(ids, attention_mask=mask).last_hidden_state
        embedded = registry.load_model(path, "embed", pooling="cls", normalize=False)(ids, mask)
    assert relative_difference(embedded, base[:, 0]) < 1e-5, "the encoder of a classifier embeds as well"


def test_an_input_beyond_the_position_table_and_an_unknown_pooling_are_refused(tmp_path):
    path = write_tiny("roberta", tmp_path)
    ids = torch.full((1, 127), 5)
    with pytest.raises(ModelConfigError, match=r"127 tokens .* max_position_embeddings = 128 .* at most 126"):
        registry.build(path)(ids, torch.ones_like(ids))
    with pytest.raises(ModelConfigError, match=r"pooling = 'cls\+median': 'median' is not supported; known are cls"):
        registry.build(path, pooling="cls+median")


def as_tensor(found, output: str) -> torch.Tensor:
    return found[output] if isinstance(found, dict) else found


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "output", "degree"), [("bert", "embedding", 1), ("roberta_classifier", "logits", 2)]
)
def test_traced_encoders_equal_eager_ones_at_any_size(tmp_path, family, output, degree):
    """A call of any size runs in the smallest bucket that holds it, and what is left out is as declared."""
    path = write_tiny(family, tmp_path)
    plan = tasks.plan(path, batch_sizes=[1, 3], prompt_buckets=[8, 16], dtype=torch.float32)
    module = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=degree, backend="eager") as model:
        for rows, length in ((1, 8), (1, 3), (2, 7), (3, 16), (1, 9)):
            ids = torch.tensor(prompts_of([length] * rows, VOCAB_SIZE, seed=length))
            mask, types = torch.ones_like(ids), torch.zeros_like(ids)
            mask[-1, length // 2 + 1 :] = 0
            expected = module(ids, mask, types)[output]
            found = as_tensor(model(input_ids=ids, attention_mask=mask, token_type_ids=types), output)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(as_tensor(model(input_ids=ids, attention_mask=mask), output), found)
        one, most = torch.ones(1, 8, dtype=torch.int64), module.config.vocab_size - 1
        for name, value in (("input_ids", most + 1), ("input_ids", -1), ("attention_mask", 2), ("token_type_ids", 2)):
            inputs = {"input_ids": one, "attention_mask": one, name: torch.full_like(one, value)}
            with pytest.raises(InputRangeError, match=f"input '{name}' holds the value {value}; it must be 0 to "):
                model(**inputs)
        model(input_ids=one * most, attention_mask=one)  # nothing ran, and the last id is one
        with pytest.raises(BucketError, match="b3_s16"):
            long = torch.ones(1, 17, dtype=torch.int64)
            model(input_ids=long, attention_mask=long)
