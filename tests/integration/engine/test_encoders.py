"""Tiny traced BERTs behind the one-shot engine: vectors and scores as by transformers and sentence-transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from nxd_infer.errors import ModelConfigError
from nxd_models.registry import parse_config
from nxd_server import LLM
from nxd_server.errors import PromptTooLongError, RequestError
from tests.support.e2e.command import here
from tests.support.engine.real_artifacts import costs_of, trace_encoder
from tests.support.tiny_models import write_tiny

TEXTS = ["A raise statement", "x", "for loops iterate over items", "你好 😀", "if", "while True: pass", "a b c d e"]
PAIRS = [("raise", "A raise statement"), ("for loops", "while True: pass"), ("x", "y")]
ONE = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}


@pytest.fixture(scope="module")
def embedder():
    model_dir, artifact = trace_encoder("bert", "embed")
    with LLM(artifact, costs=costs_of(artifact), max_delay_ms=20) as llm:
        yield model_dir, llm


@pytest.fixture(scope="module")
def classifiers():
    """(model directory, LLM) by the number of labels."""
    made = {1: trace_encoder("bert_classifier", "classify", **ONE), 3: trace_encoder("bert_classifier", "classify")}
    with LLM(made[1][1]) as one, LLM(made[3][1]) as several:
        yield {1: (made[1][0], one), 3: (made[3][0], several)}


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


# labels, fields of config.json, what they mean, and how each library is asked where its own default is another
CASES = {
    "one label": (1, {}, "sigmoid", {}, {}),
    "several labels": (3, {}, "softmax", {}, {"apply_softmax": True}),
    "labels for themselves": (
        3, {"problem_type": "multi_label_classification"}, "sigmoid", {}, {"activation_fn": torch.nn.Sigmoid()}
    ),
    "regression": (1, {"problem_type": "regression"}, "regression", {}, {"activation_fn": torch.nn.Identity()}),
    "a named activation": (3, IDENTITY, "none", {"function_to_apply": "none"}, {}),  # transformers does not read it
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_those_of_both_libraries(classifiers, tmp_path, monkeypatch, case):
    import transformers
    from sentence_transformers import CrossEncoder

    labels, changes, scores, own, asked = CASES[case]
    model_dir, llm = classifiers[labels]
    if changes:  # of the same weights
        model_dir = shutil.copytree(model_dir, tmp_path / "model")
        config = {**json.loads((model_dir / "config.json").read_text()), **changes}
        (model_dir / "config.json").write_text(json.dumps(config))
        monkeypatch.setattr(llm.encoder, "scores", parse_config(config).scores)
    assert llm.encoder.scores == scores
    raw = scores in ("none", "regression")
    pipeline = transformers.pipeline("text-classification", model=str(model_dir), device="cpu", top_k=None)
    for verdict, theirs in zip(llm.classify(TEXTS), pipeline(TEXTS, **own), strict=True):
        assert verdict.label == theirs[0]["label"]
        found = verdict.logits if raw else verdict.probabilities
        assert bool(verdict.probabilities) != raw
        assert sorted(found, reverse=True) == pytest.approx([item["score"] for item in theirs], abs=1e-5)
    theirs = CrossEncoder(str(model_dir), device="cpu").predict(PAIRS, **asked)
    for verdict, row in zip(llm.classify(PAIRS), torch.tensor(theirs).reshape(len(PAIRS), -1), strict=True):
        found = verdict.logits if raw else verdict.probabilities
        torch.testing.assert_close(torch.tensor(found), row, atol=1e-5, rtol=1e-5)


def test_verify_compares_what_is_answered(tmp_path):
    model_dir, artifact = trace_encoder("bert_classifier", "classify", **ONE)
    assert here("verify", artifact, model_dir).status == 0
    fields = {**ONE, "num_hidden_layers": 1, "problem_type": "regression"}
    other = write_tiny("bert_classifier", tmp_path / "other", **fields)
    done = here("verify", artifact, other)  # the same weights, another meaning
    assert done.status == 1 and "differs" in done.out


def test_wrong_texts_and_wrong_tasks_are_refused(embedder, classifiers):
    llm = embedder[1]
    with pytest.raises(PromptTooLongError, match=r"the text has \d+ tokens; .* a larger --prompt-buckets"):
        llm.embed("word " * 100)
    for texts in (["\ud800"], [[]], [[10**6]]):
        with pytest.raises(RequestError, match=r"texts\[0\]"):
            llm.embed(texts)
    for ask in (llm.classify, classifiers[3][1].embed, llm.generate):
        with pytest.raises(ModelConfigError):
            ask("x")
    assert llm.embed("still there").shape == (1, llm.metadata["dimensions"])
