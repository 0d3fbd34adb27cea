"""The OpenAPI document: complete, true of what a server answers, and enough for a generated client."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest

from tests.support.http.http_servers import toy_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FEW = {"max_tokens": 3, "temperature": 0}
HELLO = [{"role": "user", "content": "hello"}]
GENERATED = [
    ("post", COMPLETIONS, {"prompt": ["hello", "a"], "logprobs": 2, **FEW}),
    ("post", COMPLETIONS, {"prompt": "hello", "stream": True, "stream_options": {"include_usage": True}, **FEW}),
    ("post", COMPLETIONS, {"prompt": "hello", "best_of": 3}),
    ("post", COMPLETIONS, {"prompt": "hello", "model": "nobody"}),
    ("post", CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 1, **FEW}),
    ("post", CHAT, {"messages": HELLO, "stream": True, "logprobs": True, **FEW}),
    ("post", "/v1/responses", {"input": "hello", "max_output_tokens": 3}),
    ("post", "/v1/responses", {"input": "hello", "max_output_tokens": 3, "stream": True}),
    ("get", "/v1/responses/{response_id}", None),
    ("get", "/v1/responses/{response_id}/input_items", None),
    ("delete", "/v1/responses/{response_id}", None),
    ("post", "/v1/messages", {"messages": HELLO, "max_tokens": 3}),
    ("post", "/v1/messages", {"messages": HELLO, "max_tokens": 3, "stream": True}),
    ("post", "/v1/messages", {"messages": [], "max_tokens": 3}),
    ("post", "/v1/messages/count_tokens", {"messages": HELLO}),
    ("post", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("post", "/detokenize", {"tokens": [10, 11]}),
    ("post", "/invocations", {"messages": HELLO, **FEW}),
    ("post", "/v1/weights", {"path": "a"}),
    *(("get", path, None) for path in ("/v1/models", "/v1/models/toy", "/v1/buckets", "/v1/adapters", "/version")),
    *(("get", path, None) for path in ("/livez", "/readyz", "/health", "/ping", "/metrics")),
]
TEXT = {"input": ["hello", "a"]}
ENCODED = [
    ("post", "/v1/embeddings", TEXT),
    ("post", "/v1/embeddings", {**TEXT, "encoding_format": "base64"}),
    ("post", "/pooling", TEXT),
    ("post", "/v1/rerank", {"query": "hello", "documents": ["a", "b"]}),
    ("post", "/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("post", "/v1/classify", TEXT),
    ("post", "/v1/predict", {"inputs": {}}),
    ("get", "/v1/buckets", None),
]


@pytest.fixture(scope="module")
def document(toy):
    return toy.get("/openapi.json").json()


@pytest.mark.smoke
def test_every_route_says_what_it_takes_answers_and_refuses(document):
    ids = []
    for path, operations in document["paths"].items():
        for method, one in operations.items():
            where = f"{method} {path}: describe it in http/openapi.py"
            ids.append(one["operationId"])
            assert one["description"], where
            given = {part["name"] for part in one.get("parameters", ()) if part["in"] == "path"}
            assert given == {part[1:-1] for part in path.split("/") if part.startswith("{")}, where
            assert (method == "post") == ("requestBody" in one), where
            assert {"200", "403", "500", "503"} <= one["responses"].keys(), where
            for answer in (*one["responses"].values(), *filter(None, [one.get("requestBody")])):
                assert answer["content"] and all(form["schema"] for form in answer["content"].values()), where
            assert {name for way in one["security"] for name in way} <= document["components"]["securitySchemes"].keys()
    assert len(ids) == len(set(ids))

    def refs(part):
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        found = {part["$ref"]} if isinstance(part, dict) and "$ref" in part else set()
        return found.union(*map(refs, inner))

    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert refs(document) == names  # each resolves, and none is left over


def test_keys_are_asked_for_where_they_are_needed(document):
    assert document["paths"]["/livez"]["get"]["security"] == []
    assert {} in document["paths"][COMPLETIONS]["post"]["security"]  # this server has none
    assert {} not in document["paths"]["/v1/weights"]["post"]["security"]
    with toy_server(api_keys=["k"]) as server:
        assert server.get("/docs").status_code == 200  # which asks for the document with the key that is typed into it
        locked = server.get("/openapi.json", headers={"x-api-key": "k"}).json()
    assert locked["paths"][CHAT]["post"]["security"] == [{"bearer": []}, {"x_api_key": []}]


def strict(document):
    """The schemas, of which an answer may have no field that is not described."""
    schemas = copy.deepcopy(document["components"]["schemas"])
    for schema in schemas.values():
        if schema["type"] == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return {"components": {"schemas": schemas}}


def check_answers(server, requests):
    document = server.get("/openapi.json").json()
    schemas = strict(document)
    stored = ""
    for method, path, body in requests:
        path_asked = path.replace("{response_id}", stored)
        answer = (
            server.post(path_asked, body)
            if method == "post"
            else server._client.request(method, server.url + path_asked)
        )
        template = "/v1/models/{model}" if path == "/v1/models/toy" else path
        kind, _, _ = answer.headers["content-type"].partition(";")
        schema = document["paths"][template][method]["responses"][str(answer.status_code)]["content"][kind]["schema"]
        where = f"{method} {path} {answer.status_code}: {answer.text[:500]}"
        values = [answer.text]
        if kind == "application/json":
            values = [answer.json()]
            stored = values[0].get("id", stored) if path == "/v1/responses" else stored
        elif kind == "text/event-stream":
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
            values = [json.loads(line) for line in lines if line != "[DONE]"]
        assert values, where
        for value in values:
            try:
                jsonschema.validate(value, {**schema, **schemas})
            except jsonschema.ValidationError as error:
                told = f"{where}\nnot as http/openapi.py says: {error.message} at {error.json_path}"
                raise AssertionError(told) from None


def test_what_a_server_answers_is_what_the_document_says(toy):
    check_answers(toy, GENERATED)


def test_so_does_an_encoder():
    with toy_server(arguments=("--one-shot",)) as server:
        check_answers(server, ENCODED)
