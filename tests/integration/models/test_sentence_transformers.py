"""What sentence-transformers wrote beside a model, against that library itself on the same files."""

from __future__ import annotations

import json

import pytest
import torch

from nxd_infer.errors import ModelConfigError
from nxd_models import registry
from nxd_models.hf import sentence_transformers as sentence
from nxd_models.serving import tasks
from tests.support.models.sentence import MODULES, write_sentence_model
from tests.support.text.text_tokenizers import read_canonical
from tests.support.tiny_models import write_tiny

REVERSED = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in reversed(MODULES)]
TEXTS = ["A raise statement", "x", "for loops iterate over items, and while loops do as long as they are told to", "If"]


def embedded(path, texts):
    """By our module, of the ids that our tokenizer gives."""
    tokenizer = read_canonical(path, lowercase=sentence.lowercases(path))
    model = registry.load_model(path, "embed")
    most = sentence.longest_text(path)
    rows = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode_with_types(text, most=most)[0] + [0, 0]])
        mask = torch.ones_like(ids)
        mask[:, -2:] = 0  # padding has no part in any pooling
        with torch.no_grad():
            rows.append(model(ids, mask)[0])
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("pooling", "options"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, {"normalize": False}),
        ({"pooling_mode_cls_token": True}, {}),
        ({"pooling_mode_max_tokens": True}, {"settings": {"max_seq_length": 7, "do_lower_case": True}}),
        ({"pooling_mode_weightedmean_tokens": True}, {"family": "roberta"}),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, {"normalize": False, "settings": {"max_seq_length": None}}),
        ({"pooling_mode": ["lasttoken", "cls"], "include_prompt": True}, {"normalize": False}),
        ({}, {"normalize": False}),
        ({}, {"dense": [(24, "Tanh"), (16, "Identity")]}),
    ],
    ids=str,
)
def test_embeddings_equal_those_of_sentence_transformers(tmp_path, pooling, options):
    from sentence_transformers import SentenceTransformer

    path = write_sentence_model(tmp_path, pooling, **options)
    theirs = SentenceTransformer(str(path), device="cpu", prompts={"query": "find: "})
    expected = theirs.encode(TEXTS, convert_to_tensor=True)
    theirs.save(str(tmp_path / "saved"))
    for written in (path, tmp_path / "saved"):
        assert theirs.max_seq_length == sentence.longest_text(written)
        torch.testing.assert_close(embedded(written, TEXTS), expected, atol=2e-5, rtol=1e-4)
    assert sentence.prompts(tmp_path / "saved")["prompts"]["query"] == "find: "


def test_a_plan_has_the_limit_and_the_files(tmp_path):
    path = write_sentence_model(tmp_path, {"pooling_mode": ["cls", "mean"]}, prompts={"prompts": {"query": "q: "}})
    plan = tasks.plan(path, prompt_buckets=[16, 64])
    assert plan.metadata["length_buckets"] == [16, 20] and plan.metadata["max_len"] == 20
    assert plan.metadata["pooling"] == "cls+mean" and plan.metadata["dimensions"] == 64
    assert plan.metadata["prompts"] == {"query": "q: ", "document": ""} and plan.metadata["default_prompt"] is None
    names = {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"}
    assert names <= plan.files.keys()
    with pytest.raises(ModelConfigError, match=r"max_len = 64 is beyond max_seq_length = 20.*use at most 20"):
        tasks.plan(path, prompt_buckets=[16], max_len=64)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "median"}, r"pooling_mode = \['median'\]: known are cls, max"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt = False"),
        ("modules.json", [{"type": "sentence_transformers.models.LSTM", "path": "3"}], "the type 'LSTM' in the folder"),
        ("modules.json", REVERSED, "the modules Normalize, Pooling, Transformer are not supported in this order"),
        ("modules.json", [{"type": "sentence_transformers.models.Transformer", "path": "0_T"}], "in the folder '0_T'"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length = 0"),
        ("sentence_bert_config.json", {"query_length": 32}, "query_length = 32: not supported"),
        ("sentence_bert_config.json", {"modality_config": {"text": {}, "message": {}}}, "puts each text into the chat"),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim = 8 is not supported: remove it"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "prompts = "),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts = "),
        ("config_sentence_transformers.json", {"default_prompt_name": "no"}, "name = 'no' is not one of q"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, file, content, message):
    path = write_sentence_model(tmp_path, {}, prompts={"prompts": {"query": "q: "}})
    (path / file).write_text(json.dumps(content))
    with pytest.raises(ModelConfigError, match=message):
        tasks.plan(path)


def test_a_decoder_that_embeds_is_planned_for_that(tmp_path):
    """As Qwen3-Embedding: a causal language model's directory, with the vector of the last token and stored prompts."""
    from sentence_transformers import SentenceTransformer

    prompts = {"prompts": {"query": "Instruct: find\nQuery:"}, "similarity_fn_name": "cosine"}
    path = write_sentence_model(tmp_path, {"pooling_mode_lasttoken": True}, prompts=prompts, family="qwen3")
    plan = tasks.plan(path, prompt_buckets=[16])
    assert plan.task == "embed" and plan.metadata["pooling"] == "lasttoken" and plan.metadata["normalize"]
    assert plan.metadata["prompts"]["query"] == prompts["prompts"]["query"]
    assert plan.metadata["model_impl"] == "transformers" and "cannot do 'embed'" in plan.metadata["why_transformers"]
    assert tasks.plan(path, "generate", prompt_buckets=[16]).metadata.get("model_impl") is None
    expected = SentenceTransformer(str(path), device="cpu").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(embedded(path, TEXTS), expected, atol=2e-5, rtol=1e-4)


def test_a_cross_encoder_of_the_library_classifies(tmp_path):
    from sentence_transformers import CrossEncoder

    own = write_tiny("bert_classifier", tmp_path / "own", id2label={"0": "relevant"}, label2id={"relevant": 0})
    theirs = CrossEncoder(str(own), device="cpu")
    theirs.save(str(tmp_path / "saved"))
    plan = tasks.plan(tmp_path / "saved", prompt_buckets=[16])
    assert (plan.task, plan.metadata["labels"], plan.metadata["scores"]) == ("classify", ["relevant"], "sigmoid")
    described = tmp_path / "saved/config_sentence_transformers.json"
    described.write_text(json.dumps({"model_type": "SparseEncoder"}))
    with pytest.raises(ModelConfigError, match="model_type = 'SparseEncoder' is not supported"):
        tasks.plan(tmp_path / "saved")
