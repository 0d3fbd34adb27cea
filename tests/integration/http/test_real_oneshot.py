"""Encoders, classifiers and models of no task behind the real server: embeddings, labels, tensors in and out."""

from __future__ import annotations

import base64

import openai
import pytest
import torch
from safetensors.torch import load, save

from nxd_infer.trace import parallel_model_load, parallel_model_trace
from nxd_models.serving import tasks
from nxd_server.app.run import serve
from nxd_server.engine.oneshot_engine import OneShotEngine
from nxd_server.settings import ServerSettings
from nxd_server.text.tokenizer import Tokenizer
from tests.support.engine.real_artifacts import trace_encoder
from tests.support.http.http_artifacts import real_server, scores, trace_affine, trace_scores, trace_tiny
from tests.support.http.http_servers import is_error, logged
from tests.support.models.token_classifier import TEXTS as FOUND_IN
from tests.support.models.token_classifier import expected, write_token_classifier

EMBEDDINGS, CLASSIFY, PREDICT = "/v1/embeddings", "/v1/classify", "/v1/predict"
TEXTS = ["the with statement", "a", "while it runs, it runs", "é 中 😀", "x" * 20]


@pytest.fixture(scope="module")
def encoder():
    """A tiny BERT at degree 2: batches of 4, lengths 16 and 32."""
    artifact = trace_tiny("bert", "embed", batch_sizes=[4], prompt_buckets=[16, 32])
    with real_server(artifact) as server:
        yield server, artifact.parent / "model"


@pytest.fixture(scope="module")
def affine():
    with real_server(trace_affine()) as server:
        yield server


@pytest.mark.smoke
def test_embeddings_equal_transformers_in_both_encodings(encoder):
    from transformers import AutoModel

    server, model_dir = encoder
    tokenizer, model, expected = Tokenizer.from_dir(model_dir), AutoModel.from_pretrained(model_dir).eval(), []
    for text in TEXTS:
        ids, types = tokenizer.encode_with_types(text)
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).last_hidden_state[0]
        expected.append(torch.nn.functional.normalize(hidden.mean(0), dim=0))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        for form in ("float", "base64"):
            answer = client.embeddings.create(model="tiny-bert", input=TEXTS, encoding_format=form)
            rows = [item.embedding for item in answer.data]
            if form == "base64":
                rows = [list(memoryview(base64.b64decode(row)).cast("f")) for row in rows]
            assert [item.index for item in answer.data] == list(range(len(TEXTS)))
            torch.testing.assert_close(torch.tensor(rows), torch.stack(expected), atol=1e-5, rtol=1e-4)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
        one = client.embeddings.create(model="tiny-bert", input=TEXTS[0], dimensions=32)
        torch.testing.assert_close(torch.tensor(one.data[0].embedding), expected[0], atol=1e-5, rtol=1e-4)


def test_embeddings_of_token_ids_and_through_invocations(encoder):
    server, _ = encoder
    ids = server.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    by_text = server.post(EMBEDDINGS, {"input": TEXTS[0]}).json()["data"][0]["embedding"]
    for value in (ids, [ids]):
        by_ids = server.post(EMBEDDINGS, {"input": value}).json()["data"][0]["embedding"]
        assert by_ids == pytest.approx(by_text, abs=1e-6)
    nothing = {"annotations": [], "store": False, "embed_dtype": "float32", "endianness": "native"}
    answer = server.post("/invocations", {"input": TEXTS[0], **nothing}).json()
    assert answer["data"][0]["embedding"] == pytest.approx(by_text, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": ["a", ""]}, "input[1]"), ({"input": [999999]}, "input"),
        ({"input": "a", "dimensions": 16}, "dimensions"), ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a " * 200}, "input"), ({"input": ["a"] * 2049}, "input"),
    ],
)  # fmt: skip
def test_wrong_embedding_bodies_are_400s_that_name_the_field(encoder, body, param):
    is_error(encoder[0].post(EMBEDDINGS, body), 400, param)


def test_routes_of_other_tasks_say_which_to_use(encoder, affine):
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": []})):
        error = is_error(encoder[0].post(path, body), 400, code="task_not_supported")
        assert "/v1/embeddings" in error["message"]
    error = is_error(affine.post(EMBEDDINGS, {"input": "a"}), 400, code="task_not_supported")
    assert "/v1/predict" in error["message"]
    is_error(affine.post("/tokenize", {"prompt": "a"}), 400)


def test_predict_on_an_encoder_equals_its_embedding(encoder):
    server, _ = encoder
    ids = server.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    inputs = {"input_ids": [ids], "attention_mask": [[1] * len(ids)], "token_type_ids": [[0] * len(ids)]}
    answer = server.post(PREDICT, {"inputs": inputs}).json()
    by_text = server.post(EMBEDDINGS, {"input": TEXTS[0]}).json()["data"][0]["embedding"]
    assert answer["outputs"]["embedding"]["shape"] == [1, 32]
    assert answer["outputs"]["embedding"]["data"][0] == pytest.approx(by_text, abs=1e-6)
    inputs["input_ids"] = [[10**6] * len(ids)]
    is_error(server.post(PREDICT, {"inputs": inputs}), 400, "inputs.input_ids")


def test_predict_takes_and_gives_lists_and_safetensors(affine):
    x, k = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]]), torch.tensor([[1, 2], [3, 2**40]])
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 10
    for scale in (None, [1.0, 3.0]):
        y = x @ weight * (torch.tensor(scale) if scale else torch.full((2,), 2.0))[:, None]
        body = {"inputs": {"x": x.tolist(), "k": k.tolist(), "scale": scale}}
        outputs = affine.post(PREDICT, body).json()["outputs"]
        assert outputs["y"]["dtype"] == "float32" and outputs["y"]["shape"] == [2, 4]
        torch.testing.assert_close(torch.tensor(outputs["y"]["data"]), y)
        assert outputs["total"] == {"dtype": "int64", "shape": [2], "data": [3, 3 + 2**40]}
    y = x @ weight * 2
    flat = {"x": {"data": x.flatten().tolist(), "shape": [2, 3], "dtype": "float32"}, "k": {"data": k.tolist()}}
    outputs = affine.post(PREDICT, {"inputs": flat, "outputs": ["y"]}).json()["outputs"]
    assert list(outputs) == ["y"]
    torch.testing.assert_close(torch.tensor(outputs["y"]["data"]), y)
    packed = base64.b64encode(save({"x": x, "k": k})).decode()
    answer = affine.post(PREDICT, {"safetensors": packed}).json()
    found = load(base64.b64decode(answer["safetensors"]))
    torch.testing.assert_close(found["y"], y)
    answer = affine.post("/invocations", {"safetensors": packed, "output_format": "json"}).json()
    torch.testing.assert_close(torch.tensor(answer["outputs"]["y"]["data"]), y)


OK = {"x": [[1, 2, 3]], "k": [[1, 2]]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"inputs": OK, "safetensors": "eA=="}, "inputs"),
        ({"safetensors": "???"}, "safetensors"),
        ({"inputs": {**OK, "z": [1]}}, "inputs.z"),
        ({"inputs": {"x": [[1, 2, 3]]}}, "inputs.k"),
        ({"inputs": {**OK, "x": [[1, 2, True]]}}, "inputs.x"),
        ({"inputs": {**OK, "x": [[1, 2, 1e39]]}}, "inputs.x"),
        ({"inputs": {**OK, "k": [[1, 2.5]]}}, "inputs.k"),
        ({"inputs": {**OK, "x": {"data": [1, 2, 3], "shape": [2, 2]}}}, "inputs.x"),
        ({"inputs": {**OK, "x": {"data": [[1, 2, 3]], "dtype": "float64"}}}, "inputs"),
        ({"inputs": {**OK, "x": [[1, 2, 3, 4]]}}, "inputs"),
        ({"inputs": {"x": [[1, 2, 3]] * 5, "k": [[1, 2]] * 5}}, "inputs"),
        ({"inputs": OK, "outputs": ["nope"]}, "outputs"),
        ({"inputs": OK, "output_format": "pickle"}, "output_format"),
    ],
)
def test_wrong_tensors_are_400s_that_name_them(affine, body, param):
    is_error(affine.post(PREDICT, body), 400, param)


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    return torch.randn(count, 3), torch.rand(count)


@torch.no_grad()
def test_a_module_of_the_user_serves_any_number_of_rows():
    """Traced with ``batch_dim=0``, it declares nothing itself."""
    with real_server(trace_scores()) as server:
        for count in (1, 3, 5, 8):
            x, mask = rows_of(count)
            answer = server.post(PREDICT, {"inputs": {"x": x.tolist(), "mask": mask.tolist()}}).json()["outputs"]
            for name, expected in zip(("output_0", "output_1"), scores()(x, mask), strict=True):
                torch.testing.assert_close(torch.tensor(answer[name]["data"]), expected)
        is_error(server.post(PREDICT, {"inputs": {"x": [[1, 2, 3]] * 9, "mask": [1] * 9}}), 400, "inputs")
    with parallel_model_load(trace_scores()) as model, OneShotEngine(model, max_delay_ms=60_000) as engine:
        calls = [rows_of(count) for count in (3, 5)]
        futures = [engine.submit({"x": x, "mask": mask}) for x, mask in calls]
        for future, call in zip(futures, calls, strict=True):
            outputs = future.result(timeout=600)
            torch.testing.assert_close((outputs["output_0"], outputs["output_1"]), scores()(*call))
        assert engine.stats().bucket_steps == {"bucket_2": 1}  # together they fill it, so it waits no longer


@pytest.mark.smoke
def test_a_classifier_scores_texts_and_pairs():
    """A cross-encoder among them: its label is the relevance of the second text for the first."""
    _, artifact = trace_encoder("bert_classifier", "classify")
    with real_server(artifact) as server:
        answer = server.post(CLASSIFY, {"input": TEXTS[:2], "annotations": [], "store": False}).json()
        for item in answer["data"]:
            assert item["num_classes"] == 3 and sum(item["probs"]) == pytest.approx(1)
            assert item["label"] == ["bad", "fair", "good"][item["probs"].index(max(item["probs"]))]
        assert server.post("/invocations", {"input": TEXTS[0]}).json()["data"][0]["label"]
        is_error(server.post(EMBEDDINGS, {"input": "a"}), 400, code="task_not_supported")
    one = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
    _, artifact = trace_encoder("bert_classifier", "classify", **one)
    pairs = [["raise", "A raise statement"], ["x", "while " * 60]]
    with real_server(artifact) as server:
        is_error(server.post(CLASSIFY, {"input": pairs}), 400, "input[1]", "context_length_exceeded")
        answer = server.post(CLASSIFY, {"input": pairs, "truncate_prompt_tokens": -1}).json()
        alone = server.post(CLASSIFY, {"input": "raise"}).json()["data"][0]
        assert server.stop() == 0
    for item in (*answer["data"], alone):
        assert item["label"] == "relevant" and 0 < item["probs"][0] < 1 and item["num_classes"] == 1
    assert alone["probs"] != answer["data"][0]["probs"] != answer["data"][1]["probs"]


def test_a_token_classifier_finds_the_entities_that_transformers_finds(tmp_path):
    path = write_token_classifier(tmp_path / "model")
    plan = tasks.plan(path, batch_sizes=[2], prompt_buckets=[16], dtype=torch.float32)
    assert plan.task == "token-classification"
    parallel_model_trace(**plan.trace_arguments(), backend="eager", artifact_dir=tmp_path / "artifact")
    with real_server(tmp_path / "artifact") as server:
        for strategy in (None, "average"):
            answer = server.post(CLASSIFY, {"input": FOUND_IN, "aggregation_strategy": strategy}).json()
            for item, theirs in zip(answer["data"], expected(path, FOUND_IN, strategy or "simple"), strict=True):
                assert [one["entity_group"] for one in item["entities"]] == [one["entity_group"] for one in theirs]
                scores = [one["score"] for one in theirs]
                assert [one["score"] for one in item["entities"]] == pytest.approx(scores, rel=1e-4)
        is_error(server.post(CLASSIFY, {"input": [["a", "b"]]}), 400, "input")
        is_error(server.post(CLASSIFY, {"input": "a", "truncate_prompt_tokens": 4}), 400, "truncate_prompt_tokens")
        assert server.stop() == 0


@pytest.mark.parametrize(("name", "value"), [("speculate", 4), ("lora", ["mine=/some/where"])])
def test_what_only_generating_artifacts_have_is_refused_before_the_ranks_start(capfd, name, value):
    assert serve(trace_affine(), ServerSettings.resolve(port=0, **{name: value})) == 1
    told = logged(capfd, f"{name}: the artifact's task is '', and only 'generate' has it")
    assert "starting" not in told
