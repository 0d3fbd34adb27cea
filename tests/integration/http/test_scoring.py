"""Rerank and score behind the real server: the scores and cosines that sentence-transformers gives."""

from __future__ import annotations

import base64

import pytest
import torch

from tests.support.engine.real_artifacts import trace_encoder
from tests.support.http.http_artifacts import real_server
from tests.support.http.http_servers import is_error

ONE = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
QUERY = "what does raise do"
DOCUMENTS = ["A raise statement", "for loops iterate", "", "你好 😀", "while True: pass"]
ROUTES = "/v1/rerank", "/rerank", "/v2/rerank"


def by_index(answer):
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    return torch.tensor([one["relevance_score"] for one in sorted(results, key=lambda one: one["index"])])


def scores_of(answer):
    assert answer.status_code == 200, answer.text
    assert [one["index"] for one in answer.json()["data"]] == list(range(len(answer.json()["data"])))
    return torch.tensor([one["score"] for one in answer.json()["data"]])


def is_close(found, expected):
    torch.testing.assert_close(found, torch.as_tensor(expected).float(), atol=1e-5, rtol=0)


@pytest.fixture(scope="module", params=["sigmoid", "none"])
def cross_encoder(request):
    """(server, model directory) of a tiny cross-encoder with this activation."""
    changes = IDENTITY if request.param == "none" else {}
    model_dir, artifact = trace_encoder("bert_classifier", "classify", **ONE, **changes)
    with real_server(artifact) as server:
        yield server, model_dir


@pytest.fixture(scope="module")
def embedder():
    model_dir, artifact = trace_encoder("bert", "embed")
    with real_server(artifact) as server:
        yield server, model_dir


@pytest.mark.smoke
def test_scores_equal_those_of_a_cross_encoder_with_its_activation(cross_encoder):
    from sentence_transformers import CrossEncoder

    server, model_dir = cross_encoder
    theirs = CrossEncoder(str(model_dir), device="cpu")
    expected = theirs.predict([(QUERY, document) for document in DOCUMENTS])
    for route in ROUTES:
        answer = server.post(route, {"query": QUERY, "documents": DOCUMENTS})
        is_close(by_index(answer), expected)
    assert {**answer.json(), "results": 0, "id": 0, "usage": 0} == {"id": 0, "model": "model", "usage": 0, "results": 0}
    assert answer.json()["usage"]["total_tokens"] == answer.json()["usage"]["prompt_tokens"] > 20
    best = int(torch.tensor(expected).argmax())
    assert answer.json()["results"][0]["document"] == {"text": DOCUMENTS[best]}
    body = {"query": QUERY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "return_documents": False}
    short = server.post("/rerank", {**body, "user": "me"}).json()["results"]
    assert [one["index"] for one in short] == torch.tensor(expected).topk(2).indices.tolist()
    assert all(one.keys() == {"index", "relevance_score"} for one in short)
    logits = theirs.predict([(QUERY, DOCUMENTS[0])], activation_fn=torch.nn.Identity())
    is_close(by_index(server.post("/rerank", {**body, "documents": DOCUMENTS[:1], "use_activation": False})), logits)

    for first, second in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        is_close(scores_of(server.post("/v1/score", {first: QUERY, second: DOCUMENTS})), expected)
    is_close(scores_of(server.post("/score", {"text_1": [QUERY], "text_2": DOCUMENTS[0]})), expected[:1])
    pairs = [("a", "for"), ("x", "a"), ("if", "x y")]
    answer = server.post("/score", {"text_1": [pair[0] for pair in pairs], "text_2": [pair[1] for pair in pairs]})
    is_close(scores_of(answer), theirs.predict(pairs))
    assert answer.json()["object"] == "list" and answer.json()["data"][0]["object"] == "score"


def test_texts_are_ranked_in_the_form_of_teis_route(cross_encoder):
    """text-embeddings-inference answers a list, the best first."""
    from sentence_transformers import CrossEncoder

    server, model_dir = cross_encoder
    theirs = CrossEncoder(str(model_dir), device="cpu")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    for raw, activation in ((False, None), (True, torch.nn.Identity())):
        answer = server.post("/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": raw, "return_text": raw})
        assert answer.status_code == 200, answer.text
        ranked = answer.json()
        assert all(one.keys() == {"index", "score", *(["text"] if raw else [])} for one in ranked)
        assert all(one.get("text", DOCUMENTS[one["index"]]) == DOCUMENTS[one["index"]] for one in ranked)
        scores = [one["score"] for one in ranked]
        assert scores == sorted(scores, reverse=True)
        found = torch.tensor([one["score"] for one in sorted(ranked, key=lambda one: one["index"])])
        is_close(found, theirs.predict(pairs, activation_fn=activation))
    long = {"query": QUERY, "texts": ["while it runs " * 40]}
    is_error(server.post("/rerank", long), 400, "texts", "context_length_exceeded")
    assert len(server.post("/rerank", {**long, "truncate": True}).json()) == 1
    is_error(server.post("/rerank", {**long, "documents": ["a"]}), 400, "documents")


def test_a_regressions_classes_are_logits_and_its_ranks_have_sentence_transformers_activation():
    from sentence_transformers import CrossEncoder

    model_dir, artifact = trace_encoder("bert_classifier", "classify", **ONE, problem_type="regression")
    theirs = CrossEncoder(str(model_dir), device="cpu")
    pairs = [[QUERY, document] for document in DOCUMENTS]
    logits = theirs.predict(pairs, activation_fn=torch.nn.Identity())
    with real_server(artifact) as server:
        verdicts = server.post("/classify", {"input": pairs}).json()["data"]
        assert not any("probs" in one for one in verdicts)
        is_close(torch.tensor([one["scores"] for one in verdicts]).flatten(), logits)
        body = {"query": QUERY, "documents": DOCUMENTS}
        is_close(by_index(server.post("/rerank", body)), theirs.predict(pairs))
        is_close(by_index(server.post("/rerank", {**body, "use_activation": False})), logits)


def test_long_documents_are_named_or_cut_as_the_library_cuts_them(cross_encoder):
    from sentence_transformers import CrossEncoder

    server, model_dir = cross_encoder
    body = {"query": QUERY, "documents": ["a", "while it runs " * 40]}
    is_error(server.post("/rerank", body), 400, "documents[1]", "context_length_exceeded")
    theirs = CrossEncoder(str(model_dir), device="cpu", max_length=24)
    expected = theirs.predict([(QUERY, document) for document in body["documents"]])
    is_close(by_index(server.post("/rerank", {**body, "truncate_prompt_tokens": 24})), expected)


def test_an_embedding_model_scores_by_cosines(embedder):
    from sentence_transformers import SentenceTransformer, util

    server, model_dir = embedder
    theirs, texts = SentenceTransformer(str(model_dir), device="cpu"), [text or "x" for text in DOCUMENTS]
    query, documents = theirs.encode(QUERY, convert_to_tensor=True), theirs.encode(texts, convert_to_tensor=True)
    expected = util.cos_sim(query, documents)[0]
    is_close(by_index(server.post("/v1/rerank", {"query": QUERY, "documents": texts})), expected)
    is_close(scores_of(server.post("/score", {"text_1": QUERY, "text_2": texts})), expected)
    answer = server.post("/score", {"text_1": texts, "text_2": texts[::-1]})
    is_close(scores_of(answer), util.pairwise_cos_sim(documents, documents.flip(0)))
    for body, param in (
        ({"query": QUERY, "documents": ["a", ""]}, "documents[1]"),
        ({"query": QUERY * 99, "documents": ["a", "b"]}, "query"),
        ({"query": QUERY, "documents": ["a"], "use_activation": False}, "use_activation"),
    ):
        is_error(server.post("/rerank", body), 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"), ({"query": "a"}, "documents"), ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"), ({"query": "a", "documents": ["a"] * 2049}, "documents"),
        ({"query": "a", "documents": ["a", 5]}, "documents[1]"),
        ({"query": "a", "documents": [{"text": "a", "image": "b"}]}, "documents[0].image"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["a"], "max_tokens_per_doc": 7}, "max_tokens_per_doc"),
        ({"text_2": "a"}, "text_1"), ({"text_1": "a"}, "text_2"), ({"queries": "a", "text_2": "a"}, "documents"),
        ({"text_1": "a", "text_2": "b", "items": ["c"]}, "items"), ({"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": ["b", {"content": []}]}, "text_2[1]"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_400s_that_name_the_field(embedder, body, param):
    route = "/v1/score" if {"text_1", "text_2", "queries"} & body.keys() else "/v1/rerank"
    is_error(embedder[0].post(route, body), 400, param)


def test_a_classifier_of_several_labels_has_no_score():
    _, artifact = trace_encoder("bert_classifier", "classify")
    with real_server(artifact) as server:
        body = {"query": "a", "documents": ["b"]}
        assert "3 labels" in is_error(server.post("/rerank", body), 400, code="task_not_supported")["message"]


def test_classify_and_pooling_give_the_same_numbers(cross_encoder):
    from sentence_transformers import CrossEncoder

    server, model_dir = cross_encoder
    theirs, texts = CrossEncoder(str(model_dir), device="cpu"), [[QUERY, text] for text in DOCUMENTS]
    expected = torch.tensor(theirs.predict(texts))[:, None]
    verdicts = server.post("/classify", {"input": texts}).json()["data"]
    is_close(torch.tensor([one.get("probs", one.get("scores")) for one in verdicts]), expected)
    assert all(one["label"] == "relevant" and one["num_classes"] == 1 for one in verdicts)
    answer = server.post("/pooling", {"input": texts, "task": "classify"}).json()
    assert all(one["object"] == "pooling" for one in answer["data"]) and answer["usage"]["total_tokens"] > 20
    is_close(torch.tensor([one["data"] for one in answer["data"]]), expected)
    logits = torch.tensor(theirs.predict(texts, activation_fn=torch.nn.Identity()))[:, None]
    for route, name in (("/classify", "scores"), ("/pooling", "data")):
        raw = server.post(route, {"input": texts, "use_activation": False}).json()["data"]
        is_close(torch.tensor([one[name] for one in raw]), logits)
    ids = server.post("/tokenize", {"prompt": QUERY}).json()["tokens"]
    is_close(
        torch.tensor([server.post("/pooling", {"input": ids}).json()["data"][0]["data"]]),
        torch.tensor([server.post("/pooling", {"input": QUERY}).json()["data"][0]["data"]]),
    )
    is_error(server.post("/pooling", {"input": "a", "task": "embed"}), 400, "task")
    is_error(server.post("/pooling", {"input": "a", "dimensions": 8}), 400, "dimensions")


def test_vectors_of_a_matryoshka_model_are_cut_and_normalised():
    from sentence_transformers import SentenceTransformer

    model_dir, artifact = trace_encoder("bert", "embed", matryoshka_dimensions=[8, 16])
    texts = ["A raise statement", "x"]
    theirs = SentenceTransformer(str(model_dir), device="cpu", truncate_dim=8)
    expected = theirs.encode(texts, normalize_embeddings=True)
    with real_server(artifact) as server:
        for body in ({"dimensions": 8}, {"dimensions": 8, "encoding_format": "base64"}):
            for route, name in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
                rows = [one[name] for one in server.post(route, {"input": texts, **body}).json()["data"]]
                if "encoding_format" in body:
                    rows = [list(memoryview(base64.b64decode(row)).cast("f")) for row in rows]
                is_close(torch.tensor(rows), expected)
        for wrong in (0, 9, 64):
            error = is_error(server.post("/v1/embeddings", {"input": "a", "dimensions": wrong}), 400, "dimensions")
            assert "one of 8, 16, or 32" in error["message"]
        assert len(server.post("/v1/embeddings", {"input": "a", "dimensions": 32}).json()["data"][0]["embedding"]) == 32
