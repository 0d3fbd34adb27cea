"""Tools in chats: a model that was taught to call them, behind the real server, asked by OpenAI's client."""

from __future__ import annotations

import json
import re

import openai
import pytest

from nxd_server.http.openai.tools import offered_tools
from nxd_server.text.tokenizer import Tokenizer
from tests.support.http.http_artifacts import real_server
from tests.support.http.http_servers import events_of, is_error
from tests.support.http.taught_model import (
    ASKED,
    CALLED,
    FORECAST,
    LLAMA,
    RESULT,
    SHOWN,
    STRANGE,
    TOOLS,
    TWO,
    VERDICT,
    asked,
    taught_artifact,
)

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with real_server(taught_artifact(), "--reasoning-parser", "none") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def create(client, messages, **more):
    more = {"tools": TOOLS, "max_tokens": 150, **more}
    return client.chat.completions.create(model="taught", messages=messages, temperature=0, **more)


def functions(calls):
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or []]


@pytest.mark.smoke
def test_an_answer_is_a_call_and_the_next_one_reads_its_result(client):
    (choice,) = create(client, [ASKED]).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.id.startswith("call_")
    assert functions([call]) == [("weather", {"city": "Bern"})]
    (choice,) = create(client, [ASKED, CALLED, RESULT]).choices
    assert (choice.message.content, choice.finish_reason) == ("It is dry.", "stop")
    assert choice.message.tool_calls is None


def test_tools_reach_the_template_in_the_order_of_their_fields():
    """Templates write a tool as JSON, so another order is another prompt."""
    for fields in (("name", "description", "parameters"), ("parameters", "name", "description")):
        values = {"name": "weather", "description": "Tells.", "parameters": {"type": "object"}}
        function = {name: values[name] for name in fields}
        (shown,) = offered_tools([{"type": "function", "function": function}], None, "hermes")
        assert json.dumps(shown["function"]) == json.dumps(function)


def test_calls_in_a_stream_are_those_of_the_whole_answer(client):
    chunks = list(create(client, asked("Two!"), n=2, stream=True, logprobs=True))
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        pieces = [call for choice in mine for call in choice.delta.tool_calls or []]
        calls = [call for call in pieces if call.id]
        for piece in pieces:
            if not piece.id:
                calls[piece.index].function.arguments += piece.function.arguments
        assert functions(calls) == [("weather", {"city": "Bern"}), ("clock", {})] and len(pieces) > 12, "as written"
        assert [call.index for call in calls] == [0, 1] and len({call.id for call in calls}) == 2
        assert "".join(choice.delta.content or "" for choice in mine) == "Both: "
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["tool_calls"]
        tokens = [one.token for choice in mine if choice.logprobs for one in choice.logprobs.content]
        assert "".join(tokens) == TWO, "log probabilities of all tokens, those of the calls included"
    (whole,) = create(client, asked("Two!")).choices
    assert whole.message.content == "Both: " and len(whole.message.tool_calls) == 2
    assert set(whole.message.tool_calls[0].to_dict()) == {"id", "type", "function"}, "numbered in chunks only"
    (single,) = create(client, asked("Two!"), parallel_tool_calls=False).choices
    assert functions(single.message.tool_calls) == [("weather", {"city": "Bern"})]


def test_without_tools_nothing_is_a_call(client, server):
    for more in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        (choice,) = create(client, [ASKED], **more).choices
        assert (choice.message.content, choice.finish_reason) == ("No idea.", "stop")
    for tools, shown in ((TOOLS, SHOWN), ([], "")):
        tokens = server.post("/tokenize", {"messages": [ASKED], "tools": tools}).json()["tokens"]
        prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert prompt == shown + "<|user|>Rain?<|assistant|>"
    (choice,) = create(client, asked("JSON")).choices
    assert choice.message.content == LLAMA, "another format is text"


def named(name):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"weather", "forecast"}), (named("forecast"), {"forecast"})], ids=["any", "one"]
)
def test_a_call_that_must_be_made_is_made(client, choice, names):
    """Even of a tool that the model was never taught; its arguments are those of the tool's schema."""
    for seed in range(2):
        more = {"tools": [TOOLS[0], FORECAST], "tool_choice": choice, "seed": seed, "max_tokens": 200}
        (one,) = client.chat.completions.create(model="taught", messages=asked("Two!"), temperature=1.5, **more).choices
        if one.finish_reason == "length":  # a weather tool takes any arguments
            assert "weather" in names
            continue
        assert one.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert not (one.message.content or "").strip()
        found = functions(one.message.tool_calls)
        assert found and {name for name, _ in found} <= names and (choice == "required" or len(found) == 1)
        for name, arguments in found:
            if name == "forecast":
                assert arguments["place"] in ("Bern", "Basel") and 1 <= arguments["days"] <= 9 and len(arguments) == 2


@pytest.mark.parametrize("choice", ["required", named("weather")], ids=["any", "one"])
def test_a_call_that_must_be_made_and_is_cut_has_the_arguments_so_far(server, choice):
    """As in OpenAI's API; its text is no content. At first its name is not known, unless the request says it."""
    body = {"messages": [ASKED], "tools": TOOLS, "tool_choice": choice, "temperature": 0, "stream": True}
    texts = []
    for most in range(1, 80, 3):
        answer = server.post(CHAT, {**body, "max_tokens": most})
        parts = [one for event in events_of(answer.text)[:-1] for one in event["choices"]]
        assert not any(one["delta"].get("content") for one in parts)
        deltas, calls = [call for one in parts for call in one["delta"].get("tool_calls", [])], []
        for delta in deltas:
            if delta["index"] == len(calls):
                assert delta["id"] and delta["type"] == "function"
                calls.append([delta["function"]["name"], ""])
            assert delta["index"] == len(calls) - 1
            calls[-1][1] += delta["function"]["arguments"]
        reason = parts[-1]["finish_reason"]
        if reason != "length":
            break
        assert len(calls) == 1 or (not texts and choice == "required")
        assert {name for name, _ in calls} <= {"weather"}
        texts += [text for _, text in calls]
    assert reason == ("tool_calls" if choice == "required" else "stop")
    assert calls == [["weather", '{"city": "Bern"}']] and len(deltas) > 2, "arguments come as they are written"
    assert all('{"city": "Bern"}'.startswith(text) for text in texts) and texts == sorted(texts, key=len)
    assert len(set(texts)) > 2


def test_a_forced_call_that_a_stop_string_cuts_is_no_regular_end(server):
    body = {"messages": [ASKED], "tools": TOOLS, "tool_choice": "required", "temperature": 0, "stop": "Be"}
    (choice,) = server.post(CHAT, {**body, "max_tokens": 60}).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "']


def test_an_answer_of_a_form_may_be_a_call_instead(client):
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}
    (choice,) = create(client, [ASKED], response_format=form).choices
    assert functions(choice.message.tool_calls) == [("weather", {"city": "Bern"})]
    (choice,) = create(client, [ASKED, CALLED, RESULT], response_format=form).choices
    if not choice.message.tool_calls:
        assert set(json.loads(choice.message.content)) == {"ok"}
    (choice,) = create(client, [ASKED], response_format=form, tool_choice="none").choices
    assert set(json.loads(choice.message.content)) == {"ok"} and choice.finish_reason == "stop"


@pytest.fixture(scope="module")
def thinking():
    with (
        real_server(taught_artifact(), "--tool-call-parser", "mistral") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield server, client


def test_calls_in_mistrals_format_and_its_ids(thinking):
    server, client = thinking
    (choice,) = create(client, asked("Wind?")).choices
    (call,) = choice.message.tool_calls
    assert functions([call]) == [("weather", {"city": "Bern"})] and choice.finish_reason == "tool_calls"
    assert len(call.id) == 9 and call.id.isalnum() and not choice.message.content
    (choice,) = create(client, asked("Wind?"), tool_choice=named("weather")).choices
    assert functions(choice.message.tool_calls) == [("weather", {"city": "Bern"})]
    own = {**CALLED, "tool_calls": [{**CALLED["tool_calls"][0], "id": call.id}]}
    shown = []
    for said in ([own, {**RESULT, "tool_call_id": call.id}], [CALLED, RESULT]):
        tokens = server.post("/tokenize", {"messages": [ASKED, *said], "tools": TOOLS}).json()["tokens"]
        prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        shown.append(re.search(r"<\|user\|>\[(\w+)\]dry", prompt)[1])
    assert shown[0] == call.id and len(shown[1]) == 9, "its templates refuse other ids, such as another model's"


def test_the_reasoning_is_a_part_of_its_own(thinking):
    server, client = thinking
    none = {"tools": openai.NOT_GIVEN}
    message = create(client, asked("Why?"), **none).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "So.")
    thought = server.post("/tokenize", {"prompt": "\nHm.\n", "add_special_tokens": False}).json()["count"]
    usage = create(client, asked("Why?"), n=2, **none).usage
    assert usage.completion_tokens_details.reasoning_tokens == 2 * thought
    assert create(client, asked("JSON")).usage.completion_tokens_details.reasoning_tokens == 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = create(client, asked("Why?"), **options, **none)
    assert last.usage.completion_tokens_details.reasoning_tokens == thought
    deltas = [chunk.choices[0].delta for chunk in create(client, asked("Why?"), stream=True, **none)]
    pieces = [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")]
    assert "".join(pieces) == "Hm." and len(pieces) > 1
    assert "".join(delta.content or "" for delta in deltas) == "So."
    message = create(client, asked("Why?"), extra_body={"include_reasoning": False}, **none).choices[0].message
    assert message.reasoning_content is None and message.content == "So."
    message = create(client, asked("Why?")).choices[0].message
    assert message.reasoning_content == "Hm." and functions(message.tool_calls) == [("weather", {"city": "Bern"})]
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}
    message = create(client, asked("Why?"), response_format=form, **none).choices[0].message
    assert message.reasoning_content == "Hm." and set(json.loads(message.content)) == {"ok"}
    message = create(client, asked("Why?"), tool_choice=named("clock")).choices[0].message
    assert message.reasoning_content == "Hm." and functions(message.tool_calls)[0][0] == "clock"
    back = [*asked("Why?"), {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}, *asked("Why?")]
    assert create(client, back, max_tokens=2, **none).choices


def test_reasoning_that_the_prompt_opens(thinking):
    """The model, which was never taught to, goes on from there."""
    server, _ = thinking
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}
    close = str(Tokenizer.from_dir(taught_artifact()).token_to_id("</think>"))

    def ask(**more):
        body = {"messages": [ASKED], "max_tokens": 60, "temperature": 0, "chat_template_kwargs": {"think": 1}, **more}
        return server.post(CHAT, body).json()["choices"]

    for choice in ask(n=2, temperature=0.3, seed=1):
        assert choice["message"]["reasoning_content"] and "</think>" not in choice["message"]["content"]
    (choice,) = ask(response_format=form, logit_bias={close: 100})
    assert set(json.loads(choice["message"]["content"])) == {"ok"} and choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] is None
    is_error(server.post(CHAT, {"messages": [ASKED], "reasoning_effort": "none"}), 400, "reasoning_effort")


def test_where_no_reasoning_is_looked_for_it_is_content(client):
    """Without the tags, which are special tokens here."""
    answer = create(client, asked("Why?"), tools=openai.NOT_GIVEN)
    message = answer.choices[0].message
    assert message.content == "\nHm.\n\n\nSo." and message.reasoning_content is None
    assert answer.usage.completion_tokens_details is None


def test_earlier_reasoning_is_for_the_template(server):
    for name in ("reasoning_content", "reasoning"):
        cut = {"role": "assistant", "content": None, name: "y"}
        assert server.post("/tokenize", {"messages": [ASKED, cut, ASKED]}).status_code == 200
        for value in (None, "", [], {}, 1, ["y"]):
            messages = [ASKED, {"role": "assistant", "content": "x", name: value}, ASKED]
            answer = server.post("/tokenize", {"messages": messages})
            if value:
                is_error(answer, 400, "messages[1].reasoning_content")
            else:
                assert answer.status_code == 200
        is_error(server.post(CHAT, {"messages": [{**ASKED, name: "y"}]}), 400, f"messages[0].{name}")


def of_arguments(text):
    return {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": text}}]}


WRONG = [
    ({"tools": [{"type": "code"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "mood": 1}}]}, "tools[0].function.mood"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"messages": [of_arguments("{}x")]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [of_arguments("[]")]}, "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [of_arguments('{"a": [' + "[]," * 20_000 + "[]]}")]}, None),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "tide"}}}, "tool_choice"),
    ({"tools": [TOOLS[0], STRANGE], "tool_choice": "required"}, "tools[1].function.parameters"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters.type",
    ),
    ({"messages": [{**CALLED, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{**RESULT, "tool_call_id": 1}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_with_tools_is_named(server, body, param):
    is_error(server.post(CHAT, {"messages": [ASKED], **body}), 400, param)
