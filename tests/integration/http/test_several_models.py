"""One server of several models: names route, tasks stay apart."""

from __future__ import annotations

import re
import shutil

import pytest

from nxd_infer.errors import NxdError
from nxd_server.app.models import plan
from nxd_server.settings import ServerSettings
from tests.support.http.http_artifacts import PROMPTS, greedy_texts, real_server, trace_sampled, trace_tiny
from tests.support.http.http_servers import is_error
from tests.support.http.load import COMPLETIONS, body_of

NAMES = ["chat", "gpt", "vectors"]


@pytest.fixture(scope="module")
def encoder():
    return trace_tiny("bert", "embed", batch_sizes=[4], prompt_buckets=[16, 32])


@pytest.fixture(scope="module")
def server(encoder):
    given = [f"gpt={trace_sampled()}", f"vectors={encoder}"]
    with real_server(f"chat={trace_sampled()}", *given, "--no-generation-defaults") as server:
        yield server


@pytest.mark.smoke
def test_each_request_is_answered_by_the_model_that_it_names(server):
    models = server.get("/v1/models").json()["data"]
    assert [(model["id"], model["task"]) for model in models] == list(
        zip(NAMES, ["generate", "generate", "embed"], strict=True)
    )
    assert server.get("/v1/models/vectors").json()["task"] == "embed"
    texts = greedy_texts(trace_sampled().parent / "model", PROMPTS[:1], 4)
    for name in ("chat", "gpt"):
        for path in (COMPLETIONS, "/invocations"):
            answer = server.post(path, body_of(PROMPTS[0], model=name)).json()
            assert answer["choices"][0]["text"] == texts[PROMPTS[0]] and answer["model"] == "chat"
    for path in ("/v1/embeddings", "/invocations"):
        answer = server.post(path, {"model": "vectors", "input": ["a", "b"]}).json()
        assert len(answer["data"]) == 2 and answer["model"] == "vectors"
    generated = server.post("/generate", {"inputs": PROMPTS[0], "model": "gpt", "parameters": {"max_new_tokens": 4}})
    assert generated.json()["generated_text"] == texts[PROMPTS[0]]
    is_error(server.post("/v1/unload_lora_adapter", {"lora_name": "none"}), 403)
    assert len(server.post("/tokenize", {"model": "vectors", "prompt": "a"}).json()["tokens"]) == 3
    assert {bucket["model"] for bucket in server.get("/v1/buckets").json()["data"]} == {"chat", "vectors"}
    assert server.get("/readyz").status_code == 200
    for name, starts in (("chat", "starting 1 rank"), ("vectors", "starting 2 ranks")):
        assert f"{name}: {starts}\n" in server.log and re.search(rf"{name}: warmed up \d of \d graphs", server.log)
    assert server.metric("nxd_ready", model_name="chat") == server.metric("nxd_ready", model_name="vectors") == 1
    assert server.metric("vllm:generation_tokens_total", model_name="chat") > 0
    assert server.metric("nxd_e2e_request_latency_seconds_count", model_name="vectors") == 0


def test_a_wrong_name_or_none_is_refused_by_naming_all(server):
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/invocations", {"input": "a"}),
    ):
        error = is_error(server.post(path, body), 400, "model")
        assert all(name in error["message"] for name in NAMES)
        error = is_error(server.post(path, {**body, "model": "gpt-4"}), 404, "model", "model_not_found")
        assert all(name in error["message"] for name in NAMES)
    is_error(server.get("/v1/models/gpt-4"), 404)
    is_error(server.post("/v1/embeddings", {"input": "a", "model": "chat"}), 400, code="task_not_supported")
    is_error(server.post(COMPLETIONS, {"prompt": "a", "model": "vectors"}), 400, code="task_not_supported")


def planned(*given, **settings):
    return [(make.args[0], make.args[1]) for make in plan([str(word) for word in given], ServerSettings(**settings))]


def test_names_and_settings_of_several_models(encoder, tmp_path):
    llama = trace_sampled()
    ((artifact, settings),) = planned(f"a={llama}", f"b={llama}", served_model_name=["c", "d"])
    assert artifact == llama and settings.served_model_name == ["a", "b", "c", "d"]
    equals = tmp_path / "x=y"
    shutil.copytree(encoder, equals)
    assert planned(equals)[0][0] == equals
    found = dict(planned(llama, f"e={encoder}", speculate=0, lora=["x=/nowhere"]))
    assert found[llama].served_model_name == ["tiny-llama"] and found[llama].lora == ["x=/nowhere"]
    assert found[encoder].served_model_name == ["e"] and found[encoder].lora == []


@pytest.mark.parametrize(
    ("given", "settings", "says"),
    [
        (["{llama}", "{llama}"], {}, "given twice: with another NAME="),
        (["a={llama}", "a={encoder}"], {}, "both named 'a'"),
        (["{llama}", "{encoder}"], {"served_model_name": ["x"]}, "NAME=ARTIFACT names each"),
        (["{llama}", "{encoder}"], {"expect_digest": "0"}, "expect_digest is of one model, and 2 are given"),
        (["{encoder}", "{other}"], {"lora": ["x=/y"]}, "lora is of one model that generates, and 0"),
        (["a={llama}", "b={nowhere}"], {}, "nowhere is missing"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(encoder, tmp_path, given, settings, says):
    other = tmp_path / "other"
    shutil.copytree(encoder, other)
    places = {"llama": trace_sampled(), "encoder": encoder, "other": other, "nowhere": tmp_path / "nowhere"}
    with pytest.raises(NxdError, match=says):
        planned(*(word.format(**places) for word in given), **settings)
