"""Tiny traced BERTs behind the one-shot engine: the same vectors as transformers, alone and in a batch."""

from __future__ import annotations

import pytest
import torch

from nxd_infer.errors import InputRangeError, ModelConfigError
from nxd_server import LLM, SamplingParams
from nxd_server.errors import PromptTooLongError, RequestError
from tests.support.engine.real_artifacts import costs_of, trace_encoder

TEXTS = ["A raise statement", "x", "for loops iterate over items", "你好 😀", "if", "while True: pass", "a b c d e"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    model_dir, artifact = trace_encoder(tmp_path_factory.mktemp("embed"), "bert", "embed")
    with LLM(artifact, costs=costs_of(artifact), max_delay_ms=20) as llm:
        yield model_dir, llm


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    model_dir, artifact = trace_encoder(tmp_path_factory.mktemp("classify"), "bert_classifier", "classify")
    with LLM(artifact) as llm:
        yield model_dir, llm


def test_embeddings_equal_those_of_transformers_and_company_changes_nothing(embedder):
    transformers = pytest.importorskip("transformers")
    model_dir, llm = embedder
    model = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
    together = llm.embed(TEXTS)
    assert llm.engine.batches, "rows of an encoder are declared independent"
    for text, vector in zip(TEXTS, together, strict=True):
        ids = torch.tensor([llm.tokenizer.encode(text)])
        with torch.no_grad():
            hidden = model(ids).last_hidden_state[0].mean(0)
        if llm.metadata["normalize"]:
            hidden = hidden / hidden.norm()
        assert (vector - hidden).abs().max() < 1e-5
        assert (llm.embed(text)[0] - vector).abs().max() < 1e-6
    assert llm.embed([]).shape[0] == 0
    stats = llm.engine.stats()
    assert sum(stats.bucket_steps.values()) < stats.finished["done"]


def test_classes_equal_those_of_transformers(classifier):
    transformers = pytest.importorskip("transformers")
    model_dir, llm = classifier
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32).eval()
    for text, verdict in zip(TEXTS, llm.classify(TEXTS), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([llm.tokenizer.encode(text)])).logits[0]
        assert torch.allclose(torch.tensor(verdict.logits), logits, atol=1e-5)
        assert verdict.label == model.config.id2label[int(logits.argmax())]
        assert sum(verdict.probabilities) == pytest.approx(1)


def test_wrong_texts_and_wrong_tasks_are_refused(embedder, classifier):
    llm = embedder[1]
    with pytest.raises(PromptTooLongError, match=r"the text has \d+ tokens; .* a larger --prompt-buckets"):
        llm.embed("word " * 100)
    for texts in (["\ud800"], [[]], [[10**6]]):
        with pytest.raises(RequestError, match=r"texts\[0\]"):
            llm.embed(texts)
    with pytest.raises(InputRangeError, match="input_ids"):
        llm.engine.submit({"input_ids": torch.tensor([[10**6]]), "attention_mask": torch.ones(1, 1).long()})
    with pytest.raises(ModelConfigError):
        llm.classify("x")
    with pytest.raises(ModelConfigError):
        classifier[1].embed("x")
    with pytest.raises(ModelConfigError):
        llm.generate("x", SamplingParams())
    assert llm.embed("still there").shape == (1, llm.metadata["dimensions"])
