"""What a classifier answers is what transformers and sentence-transformers make of the same logits."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from nxd_infer.errors import ArtifactVersionError, ModelConfigError
from nxd_models.registry import parse_config
from nxd_server import LLM
from nxd_server.engine import OneShotEngine, TextEncoder
from nxd_server.engine.classifier_scores import scores_of
from nxd_server.http.openai.embeddings import verdict_on
from tests.support.e2e.command import nxd_infer_here
from tests.support.engine.real_artifacts import trace_encoder
from tests.support.engine.toy_oneshot import ToyOneShot
from tests.support.tiny_models import FAMILIES, write_tiny

TEXTS = ["A raise statement", "x", "for loops iterate over items"]
PAIRS = [("raise", "A raise statement"), ("for loops", "while True: pass"), ("x", "y")]
ONE = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}

# fields of config.json, what they mean, and how each library is asked where its own default is another
CASES = {
    "one label": (ONE, "sigmoid", {}),
    "several labels": ({}, "softmax", {"apply_softmax": True}),
    "labels for themselves": (
        {"problem_type": "multi_label_classification"},
        "sigmoid",
        {"activation_fn": torch.nn.Sigmoid()},
    ),
    "regression": ({**ONE, "problem_type": "regression"}, "none", {"activation_fn": torch.nn.Identity()}),
    "a named activation": (IDENTITY, "none", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_those_of_both_libraries(tmp_path, case):
    import transformers
    from sentence_transformers import CrossEncoder

    changes, scores, asked = CASES[case]
    model_dir, artifact = trace_encoder(tmp_path, "bert_classifier", "classify", **changes)
    with LLM(artifact) as llm:
        assert llm.metadata["scores"] == scores
        alone, pairs = llm.classify(TEXTS), llm.classify(PAIRS)
    own = {} if case != "a named activation" else {"function_to_apply": "none"}  # transformers does not read it
    pipeline = transformers.pipeline("text-classification", model=str(model_dir), device="cpu", top_k=None)
    for verdict, theirs in zip(alone, pipeline(TEXTS, **own), strict=True):
        assert verdict.label == theirs[0]["label"]
        found = verdict.logits if scores == "none" else verdict.probabilities
        assert bool(verdict.probabilities) == (scores != "none")
        assert sorted(found, reverse=True) == pytest.approx([item["score"] for item in theirs], abs=1e-5)
    theirs = CrossEncoder(str(model_dir), device="cpu").predict(PAIRS, **asked)
    for verdict, row in zip(pairs, torch.tensor(theirs).reshape(len(PAIRS), -1), strict=True):
        found = verdict.logits if scores == "none" else verdict.probabilities
        torch.testing.assert_close(torch.tensor(found), row, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("scores", "field"), [("none", "scores"), ("sigmoid", "probs"), ("softmax", "probs")])
def test_what_http_answers_has_its_label_whatever_the_scores_mean(scores, field):
    answer = verdict_on(torch.tensor([0.5, 2.0, -1.0]), ["bad", "fair"], scores)
    assert answer["label"] == "fair" and answer["num_classes"] == len(answer[field]) == 3
    assert {"probs", "scores"} & set(answer) == {field}
    assert verdict_on(torch.tensor([0.5, 2.0, 3.0]), ["bad", "fair"], scores)["label"] == "2"  # it has no name


def test_verify_compares_what_is_answered(tmp_path, capsys, monkeypatch):
    model_dir, artifact = trace_encoder(tmp_path, "bert_classifier", "classify", **ONE)
    assert nxd_infer_here(capsys, monkeypatch, "verify", artifact, model_dir).status == 0
    other = write_tiny("bert_classifier", tmp_path / "other", **ONE, problem_type="regression")
    done = nxd_infer_here(capsys, monkeypatch, "verify", artifact, other)  # the same weights, another meaning
    assert done.status == 1 and "differs" in done.out


def test_an_artifact_whose_scores_mean_what_is_not_known_is_not_served():
    model = ToyOneShot()
    model.manifest.metadata |= {"task": "classify", "scores": "tanh"}
    engine: Any = OneShotEngine(model)
    with pytest.raises(ArtifactVersionError, match=r"scores = 'tanh': .* knows sigmoid, softmax and none"):
        TextEncoder(engine, cast("Any", None))


def test_what_an_older_artifact_meant():
    assert [scores_of(meta) for meta in ({}, {"labels": ["one"]}, {"labels": ["one"], "regression": True})] == [
        *("softmax", "sigmoid", "none"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem_type": "ranking"}, "problem_type = 'ranking': expected one of regression, single_label"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "activation_fn = 'torch.nn.Tanh' is not supp"),
    ],
)
def test_a_meaning_that_is_not_known_is_refused(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        parse_config({**FAMILIES["bert_classifier"], **changes})


def test_an_activation_of_the_users_own_code_is_not_run():
    named = {"sbert_ce_default_activation_function": "my_code.Act"}
    assert parse_config({**FAMILIES["bert_classifier"], **ONE, **named}).scores == "sigmoid"
