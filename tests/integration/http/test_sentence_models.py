"""Models of sentence-transformers behind the real server: prompts, the longest text, pairs of a cross-encoder."""

from __future__ import annotations

import json

import pytest
import torch

from nxd_infer import trace
from nxd_models.serving import tasks
from tests.support.http.http_artifacts import real_server
from tests.support.http.http_servers import is_error
from tests.support.models.sentence import write_sentence_model

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["A raise", "x"]
LONG = "for loops iterate over items, and while loops do as long as they are told to"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny model with prompts, a default one among them, whose longest text has 20 tokens."""
    directory = tmp_path_factory.mktemp("sentence")
    prompts = {"prompts": {"query": "find: ", "passage": "read: "}, "default_prompt_name": "passage"}
    path = write_sentence_model(directory / "model", {"pooling_mode": ["cls", "mean"]}, prompts=prompts)
    plan = tasks.plan(path, batch_sizes=[1], prompt_buckets=[32], dtype=torch.float32)
    with trace.parallel_model_trace(**plan.trace_arguments(), tp_degree=1, backend="eager") as model:
        trace.parallel_model_save(model, directory / "artifact")
    listed = json.loads((directory / "artifact" / "manifest.json").read_text())["files"]
    assert {"modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"} <= listed.keys()
    with real_server(directory / "artifact") as server:
        yield server, path


def vectors(server, texts, **more):
    answer = server.post(EMBEDDINGS, {"input": texts, **more})
    assert answer.status_code == 200, answer.text
    return torch.tensor([item["embedding"] for item in answer.json()["data"]])


def test_prompts_and_cut_texts_equal_those_of_sentence_transformers(served):
    from sentence_transformers import SentenceTransformer

    server, path = served
    theirs = SentenceTransformer(str(path), device="cpu")
    for name in (None, "query"):
        expected = theirs.encode(TEXTS, prompt_name=name, convert_to_tensor=True)
        torch.testing.assert_close(vectors(server, TEXTS, prompt_name=name), expected, atol=2e-5, rtol=1e-4)
    ids = [theirs.tokenizer(text)["input_ids"] for text in TEXTS]  # they are taken as they are
    expected = theirs.encode(TEXTS, prompt="", convert_to_tensor=True)
    torch.testing.assert_close(vectors(server, ids), expected, atol=2e-5, rtol=1e-4)
    error = is_error(server.post(EMBEDDINGS, {"input": ["x", LONG]}), 400, "input[1]", "context_length_exceeded")
    assert "this model's maximum context length is 20 tokens" in error["message"]
    expected = theirs.encode([LONG], convert_to_tensor=True)
    for most in (-1, 20):
        found = vectors(server, LONG, truncate_prompt_tokens=most)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    theirs.max_seq_length = 9
    expected = theirs.encode([LONG], convert_to_tensor=True)
    torch.testing.assert_close(vectors(server, LONG, truncate_prompt_tokens=9), expected, atol=2e-5, rtol=1e-4)
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 20


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_name": "nope"}, "prompt_name"),
        ({"prompt_name": "query", "input": [5, 6]}, "prompt_name"),
        ({"input": [["a", "b"]]}, "input[0][0]"),
        *(({"truncate_prompt_tokens": wrong}, "truncate_prompt_tokens") for wrong in (0, 2, 21, True)),
    ],
)
def test_wrong_options_are_400s_that_name_the_field(served, more, param):
    is_error(served[0].post(EMBEDDINGS, {"input": "a", **more}), 400, param)
