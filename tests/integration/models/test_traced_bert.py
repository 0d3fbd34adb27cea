"""Traced encoders: the model's declarations let a call of any size run in the smallest bucket, and change nothing."""

import pytest
import torch

from nxd_infer.errors import BucketError, InputRangeError
from nxd_infer.trace import parallel_model_trace
from nxd_models.hf import weights as hf
from nxd_models.serving import tasks
from tests.integration.models.test_bert import SENTENCES, minilm
from tests.support.models.helpers import prompts_of, reference
from tests.support.tiny_models import VOCAB_SIZE, write_tiny


@pytest.mark.parametrize(
    ("family", "output", "degree"), [("bert", "embedding", 1), ("roberta_classifier", "logits", 2)]
)
def test_traced_encoders_equal_eager_ones(tmp_path, family, output, degree):
    path = write_tiny(family, tmp_path)
    plan = tasks.plan(path, batch_sizes=[1, 3], prompt_buckets=[8, 16], dtype=torch.float32)
    module = hf.load(plan.func(**plan.func_kwargs), plan.checkpoint_loader_callable())
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=degree, backend="eager") as model, torch.no_grad():
        for rows, length in ((1, 8), (1, 3), (2, 7), (3, 16), (1, 9)):
            ids = torch.tensor(prompts_of([length] * rows, VOCAB_SIZE, seed=length))
            mask, types = torch.ones_like(ids), torch.zeros_like(ids)
            mask[-1, length // 2 + 1 :] = 0
            expected = module(ids, mask, types)[output]
            found = model(input_ids=ids, attention_mask=mask, token_type_ids=types)
            found = found[output] if isinstance(found, dict) else found
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            defaulted = model(input_ids=ids, attention_mask=mask)
            defaulted = defaulted[output] if isinstance(defaulted, dict) else defaulted
            torch.testing.assert_close(defaulted, found)
        one, most = torch.ones(1, 8, dtype=torch.int64), module.config.vocab_size - 1
        for name, value in (("input_ids", most + 1), ("input_ids", -1), ("attention_mask", 2), ("token_type_ids", 2)):
            inputs = {"input_ids": one, "attention_mask": one, name: torch.full_like(one, value)}
            with pytest.raises(InputRangeError, match=f"input '{name}' holds the value {value}; it must be 0 to "):
                model(**inputs)
        model(input_ids=one * most, attention_mask=one)  # nothing ran, and the last id is one
        with pytest.raises(BucketError, match="b3_s16"):
            long = torch.ones(1, 17, dtype=torch.int64)
            model(input_ids=long, attention_mask=long)


def test_traced_minilm_equals_transformers():
    """Real weights at degree 2, sentences of several lengths in length buckets."""
    import tokenizers

    path = minilm()
    plan = tasks.plan(path, batch_sizes=[2], prompt_buckets=[16, 32], dtype=torch.float32)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with parallel_model_trace(**plan.trace_arguments(), tp_degree=2, backend="eager") as model, torch.no_grad():
        for sentence in SENTENCES:
            ids = torch.tensor([tokenizer.encode(sentence).ids])
            hidden = reference(path, "Model")(ids).last_hidden_state
            expected = torch.nn.functional.normalize(hidden.mean(1), dim=-1)
            found = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            found = found["embedding"] if isinstance(found, dict) else found
            assert (found - expected).abs().max() < 1e-4
