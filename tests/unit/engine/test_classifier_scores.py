"""What a classifier's logits mean: declared by the model's configuration, then by its artifact."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from nxd_infer.errors import ArtifactVersionError, ModelConfigError
from nxd_models.registry import parse_config
from nxd_server.engine import OneShotEngine, TextEncoder
from nxd_server.http.openai.embeddings import verdict_on
from tests.support.engine.toy_oneshot import ToyOneShot
from tests.support.tiny_models import FAMILIES


@pytest.mark.parametrize(("scores", "field"), [("none", "scores"), ("sigmoid", "probs"), ("softmax", "probs")])
def test_what_http_answers_has_its_label_whatever_the_scores_mean(scores, field):
    answer = verdict_on(torch.tensor([0.5, 2.0, -1.0]), ["bad", "fair"], scores)
    assert answer["label"] == "fair" and answer["num_classes"] == len(answer[field]) == 3
    assert {"probs", "scores"} & set(answer) == {field}
    assert verdict_on(torch.tensor([0.5, 2.0, 3.0]), ["bad", "fair"], scores)["label"] == "2"  # it has no name


def test_a_kind_of_scores_that_is_not_known_is_refused():
    model = ToyOneShot()
    model.manifest.metadata |= {"task": "classify", "scores": "tanh"}
    engine: Any = OneShotEngine(model)
    with pytest.raises(ArtifactVersionError, match=r"scores = 'tanh': .* knows sigmoid, softmax, none, regression"):
        TextEncoder(engine, cast("Any", None))


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
    one = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
    named = {"sbert_ce_default_activation_function": "my_code.Act"}
    assert parse_config({**FAMILIES["bert_classifier"], **one, **named}).scores == "sigmoid"
