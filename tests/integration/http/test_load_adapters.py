"""LoRA adapters over HTTP: loaded, listed, asked by the model's name, taken away; and who may do that."""

from __future__ import annotations

import shutil

import pytest

from tests.support.adapter_files import merge, write_adapter
from tests.support.http.http_artifacts import greedy_texts, real_server, trace_sampled
from tests.support.http.http_servers import events_of, is_error
from tests.support.tiny_models import EOS

ADMIN = {"headers": {"authorization": "Bearer admin"}}
PROMPTS, TOKENS = ["the with", "for 3", "class import try"], 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def artifact(root):
    return trace_sampled(root)


@pytest.fixture(scope="module")
def adapters(root, artifact):
    files = root / "files"
    made = {name: write_adapter(files / name, root / "model", rank=4, seed=i) for i, name in enumerate(("x", "y"))}
    write_adapter(files / "wide", root / "model", rank=5)
    write_adapter(root / "outside", root / "model", rank=4)
    (files / "link").symlink_to(root / "outside")
    return made


@pytest.fixture(scope="module")
def server(root, artifact, adapters):
    """With the adapter x from the beginning, and greedy as transformers is: without the model's own penalty."""
    admin = ("--admin-key", "admin", "--weights-root", str(root / "files"))
    options = ("--lora", f"x={adapters['x']}", "--no-generation-defaults")
    with real_server(artifact, *admin, *options) as server:
        yield server


def ask(server, model, prompt, **more):
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}
    return server.post("/v1/completions", body)


def remove(server, name, **more):
    return server._client.delete(f"{server.url}/v1/adapters/{name}", **more)


@pytest.mark.smoke
def test_adapters_come_and_go_while_the_model_is_served(server, root, adapters):
    models = {"tiny-llama": root / "model"}
    models |= {name: merge(root / "model", path, root / f"merged-{name}") for name, path in adapters.items()}
    texts = {name: greedy_texts(path, PROMPTS, TOKENS) for name, path in models.items()}
    assert server.get("/v1/models").json()["data"][0]["generation_defaults"] == {"stop_token_ids": [EOS, 200]}
    assert [card["id"] for card in server.get("/v1/adapters").json()["data"]] == ["x"]
    answer = server.post("/v1/adapters", {"name": "team/y", "path": "y"}, **ADMIN)
    assert answer.status_code == 200, answer.text
    created = answer.json().pop("created")
    assert answer.json() == {"id": "team/y", "object": "adapter", "created": created, "slot": 2, "running": 0}
    for prompt in PROMPTS:
        for name, source in (("tiny-llama", "tiny-llama"), ("x", "x"), ("team/y", "y")):
            answer = ask(server, name, prompt).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, texts[source][prompt])
    events = events_of(ask(server, "team/y", PROMPTS[0], stream=True).text)
    assert {event["model"] for event in events[:-1]} == {"team/y"}
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == texts["y"][PROMPTS[0]]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    answers = {name: server.post("/v1/chat/completions", {"model": name, **chat}).json() for name in ("x", "team/y")}
    assert {name: answer["model"] for name, answer in answers.items()} == {"x": "x", "team/y": "team/y"}

    cards = server.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [
        ("tiny-llama", None), ("x", "tiny-llama"), ("team/y", "tiny-llama"),
    ]  # fmt: skip
    assert server.get("/v1/models/team/y").json() == cards[2]

    gone = remove(server, "team/y", **ADMIN)
    assert gone.status_code == 200 and gone.json()["deleted"] is True and gone.json()["running"] == 0
    error = is_error(ask(server, "team/y", PROMPTS[0]), 404, "model", "model_not_found")
    assert "'tiny-llama', 'x'" in error["message"]
    is_error(server.get("/v1/models/team/y"), 404)
    is_error(remove(server, "team/y", **ADMIN), 404)
    assert ask(server, "x", PROMPTS[1]).json()["choices"][0]["text"] == texts["x"][PROMPTS[1]]


def test_only_an_admin_changes_what_is_served(server):
    body = {"name": "y", "path": "y"}
    is_error(server.post("/v1/adapters", body), 401)
    is_error(server.post("/v1/adapters", body, headers={"x-api-key": "other"}), 403)
    is_error(remove(server, "x"), 401)
    assert [card["id"] for card in server.get("/v1/adapters").json()["data"]] == ["x"]


def test_vllms_routes_load_and_unload_for_an_admin(server, root, adapters):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "sql", "lora_path": "y", "lora_int_id": 3}
    is_error(server.post(load, body), 401)
    answer = server.post(load, body, **ADMIN)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    text = greedy_texts(merge(root / "model", adapters["y"], root / "merged-sql"), PROMPTS[:1], TOKENS)[PROMPTS[0]]
    assert ask(server, "sql", PROMPTS[0]).json()["choices"][0]["text"] == text
    is_error(server.post(load, body, **ADMIN), 409, code="adapter_conflict")
    is_error(server.post(load, {**body, "lora_name": "z", "lora_path": "nothing"}, **ADMIN), 400, "lora_path")
    is_error(server.post(unload, {"lora_name": "sql"}), 401)
    answer = server.post(unload, {"lora_name": "sql"}, **ADMIN)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    is_error(ask(server, "sql", PROMPTS[0]), 404, "model", "model_not_found")
    is_error(server.post(unload, {"lora_name": "sql"}, **ADMIN), 404)


def test_what_cannot_be_loaded_is_refused_by_name(server, root):
    def load(name, path):
        return server.post("/v1/adapters", {"name": name, "path": str(path)}, **ADMIN)

    error = is_error(load("y", "wide"), 400, "path", "invalid_value")
    assert "rank is 5" in error["message"] and "at most 4" in error["message"] and "--lora-rank 5" in error["message"]
    is_error(load("y", root / "outside"), 403)
    is_error(load("y", "link"), 403)
    is_error(load("y", "nothing"), 400, "path")
    is_error(load("a b", "y"), 400, "name")
    is_error(load("x", "y"), 409, code="adapter_conflict")
    is_error(load("tiny-llama", "y"), 409, code="adapter_conflict")
    assert load("y", "y").status_code == 200
    assert "all 2 slots" in is_error(load("z", "y"), 409)["message"]
    assert remove(server, "y", **ADMIN).status_code == 200
    assert [card["id"] for card in server.get("/v1/adapters").json()["data"]] == ["x"]


def test_files_that_are_nested_too_deeply_are_refused(server, root):
    """Each is a 400 and changes nothing."""
    folder = root / "files" / "hurt"
    shutil.copytree(root / "files" / "y", folder)
    deep = "[" * 100_000 + "]" * 100_000
    header = f'{{"w": {deep}}}'.encode()
    weights = len(header).to_bytes(8, "little") + header

    def refused(route="/v1/adapters", code="invalid_value", **more):
        answer = server.post(route, {"path": "hurt", **more}, **ADMIN)
        return is_error(answer, 400, "path", code)["message"]

    (folder / "adapter_model.safetensors").write_bytes(weights)
    assert "adapter_model.safetensors" in refused(name="h")
    assert "adapter_model.safetensors" in refused("/v1/weights", "weights_refused")
    (folder / "adapter_config.json").write_text(deep)
    assert "adapter_config.json" in refused(name="h")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(deep)
    assert "model.safetensors.index.json" in refused("/v1/weights", "weights_refused")
    shutil.rmtree(folder)
    assert [card["id"] for card in server.get("/v1/adapters").json()["data"]] == ["x"]


def test_a_model_without_slots_and_a_server_without_an_admin(toy):
    assert toy.get("/v1/adapters").json() == {"object": "list", "data": []}
    is_error(toy.post("/v1/adapters", {"name": "y", "path": "y"}), 403, code="admin_disabled")


def test_an_adapter_that_cannot_be_preloaded_ends_the_start(root, artifact, adapters):
    with real_server(artifact, "--lora", f"w={root / 'files' / 'wide'}", wait=False) as server:
        assert server.wait(600) == 1
        assert "rank is 5" in server.log
