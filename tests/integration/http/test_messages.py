"""``/v1/messages``, asked by Anthropic's client."""

from __future__ import annotations

import json

import anthropic
import pytest

from tests.support.http.http_artifacts import real_server
from tests.support.http.taught_model import ASKED, CALLED, RESULT, TEMPLATE, TOOLS, VERDICT, taught_artifact

ROUTE = "/v1/messages"
EMPTY = {"type": "object", "properties": {}}
FUNCTIONS = [{"name": "weather", "input_schema": EMPTY}, {"name": "clock", "input_schema": EMPTY, "type": "custom"}]
GREEDY = {"model": "taught", "max_tokens": 150, "extra_body": {"temperature": 0}}
USED = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bern"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its template opens the reasoning if ``enable_thinking`` says so."""
    template = tmp_path_factory.mktemp("messages") / "chat_template.jinja"
    template.write_text(TEMPLATE.replace("if think is defined", "if enable_thinking"))
    with real_server(taught_artifact(), "--api-key", "one", "--chat-template", str(template)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="one", max_retries=0) as client:
        yield client


def user(content):
    return {"role": "user", "content": content}


def result(content, **more):
    return user([{"type": "tool_result", "tool_use_id": "call_1", "content": content, **more}])


def chat(server, messages, **more):
    body = {"messages": messages, "temperature": 0, "max_tokens": 150, **more}
    return server.post("/v1/chat/completions", body, headers={"x-api-key": "one"}).json()


@pytest.mark.smoke
def test_a_conversation_with_a_tool_has_the_answers_of_a_chat(server, client):
    first = client.messages.create(messages=[ASKED], tools=FUNCTIONS, **GREEDY)
    (call,) = first.content
    assert (first.stop_reason, call.type, call.name, call.input) == (
        "tool_use",
        "tool_use",
        "weather",
        {"city": "Bern"},
    )
    said = [ASKED, {"role": "assistant", "content": [USED]}]
    for content in ("dry", [{"type": "text", "text": "dry", "cache_control": {"type": "ephemeral"}}]):
        answer = client.messages.create(messages=[*said, result(content)], tools=FUNCTIONS, **GREEDY)
        assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "It is dry."}]
        assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
        other = chat(server, [ASKED, CALLED, RESULT], tools=TOOLS)["usage"]
        read = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        assert (read, answer.usage.output_tokens) == (other["prompt_tokens"], other["completion_tokens"])
    answer = client.messages.create(
        messages=[*said, result("dry", is_error=True)],
        tools=FUNCTIONS,
        system=[{"type": "text", "text": "Short."}],
        **GREEDY,
    )
    system = {"role": "system", "content": "Short."}
    expected = chat(server, [system, ASKED, CALLED, {**RESULT, "content": "Error: dry"}], tools=TOOLS)
    assert answer.content[0].text == expected["choices"][0]["message"]["content"]


def test_anthropics_own_loop_of_tools_goes_on_without_a_thread(client):
    """It asks for one, whose conversation a server would keep, and sends all of it once it is refused."""
    weather = anthropic.beta_tool(lambda city: "dry", name="weather", description="", input_schema=EMPTY)
    clock = anthropic.beta_tool(lambda: "noon", name="clock", description="", input_schema=EMPTY)
    answers = list(client.beta.messages.tool_runner(messages=[ASKED], tools=[weather, clock], **GREEDY))
    assert answers[0].stop_reason == "tool_use" and len(answers) > 1


def test_what_claude_code_sends_is_taken(server, client):
    """Its reminders are the system's, whose messages come behind the user's."""
    asks = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("Be ", "brief.")]
    body = {"system": system, "messages": [ASKED, {"role": "system", "content": "Now."}], "max_tokens": 150, **asks}
    answer = server.post(ROUTE, {**body, "temperature": 0}, headers={"x-api-key": "one"}).json()
    parts = [{"type": "text", "text": text} for text in ("Be ", "brief.", "Now.")]
    expected = chat(server, [{"role": "system", "content": parts}, ASKED])["choices"][0]["message"]["content"]
    assert "".join(block["text"] for block in answer["content"]) == expected


def test_tokens_are_counted_as_they_are_used(server, client):
    for more in ({}, {"tools": FUNCTIONS}, {"system": "Short."}):
        counted = client.messages.count_tokens(model="taught", messages=[ASKED], **more).input_tokens
        usage = client.messages.create(messages=[ASKED], **more, **GREEDY).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens


STREAMS = [
    ("Why?", [], [("thinking", "Hm."), ("text", "So.")], "end_turn"),
    ("Two!", FUNCTIONS, [("text", "Both: "), ("tool_use", {"city": "Bern"}), ("tool_use", {})], "tool_use"),
]


@pytest.mark.parametrize(("asked", "tools", "blocks", "reason"), STREAMS, ids=["thinking", "tools"])
def test_a_stream_has_its_events_in_order(client, asked, tools, blocks, reason):
    fields = {"messages": [user(asked)], "tools": tools, **GREEDY}
    raw = list(client.messages.create(stream=True, **fields))
    kinds = [event.type for event in raw]
    expected = ["content_block_start", "content_block_delta", "content_block_stop"] * len(blocks)
    middle = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind][1:-2]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"] and middle == expected
    with client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    whole = client.messages.create(**fields)
    for message in (final, whole):
        fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
        assert [(one.type, getattr(one, fields[one.type])) for one in message.content] == blocks
        assert message.stop_reason == reason and message.usage.output_tokens == whole.usage.output_tokens
    assert raw[0].message.usage.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens
    deltas = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
    found = [event.delta.type for event in raw if event.type == "content_block_delta"]
    assert set(found) == {deltas[kind] for kind, _ in blocks}
    assert found.count("input_json_delta") > 10 or not tools, "as the model writes them"


def test_why_an_answer_ends(client):
    answer = client.messages.create(messages=[ASKED], **{**GREEDY, "max_tokens": 2})
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)
    answer = client.messages.create(messages=[ASKED], stop_sequences=["idea"], **GREEDY)
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "idea", "No ")
    answer = client.messages.create(
        messages=[ASKED], tools=FUNCTIONS, tool_choice={"type": "any"}, **{**GREEDY, "max_tokens": 60}
    )
    assert answer.stop_reason == "tool_use"
    used = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    answer = client.messages.create(messages=[ASKED], tools=FUNCTIONS, tool_choice=used, **GREEDY)
    assert answer.stop_reason == "tool_use" and [block.name for block in answer.content] == ["weather"]
    cut = {**GREEDY, "max_tokens": answer.usage.output_tokens - 16}
    answer = client.messages.create(messages=[ASKED], tools=FUNCTIONS, tool_choice=used, **cut)
    assert answer.stop_reason == "max_tokens" and answer.content[0].input == {}
    none = {"type": "none"}
    answer = client.messages.create(messages=[ASKED], tools=FUNCTIONS, tool_choice=none, **GREEDY)
    assert answer.content[0].text == "No idea."
    form = {"format": {"type": "json_schema", "schema": VERDICT}}
    answer = client.messages.create(messages=[ASKED], output_config=form, **GREEDY)
    assert set(json.loads(answer.content[-1].text)) == {"ok"}


def test_earlier_thinking_comes_back_and_turns_of_one_role_are_one(server, client):
    thought = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "So."}]
    messages = [user("Why?"), {"role": "assistant", "content": thought}, user("Why?"), user("Rain?")]
    answer = client.messages.create(messages=messages, **GREEDY)
    parts = [{"type": "text", "text": text} for text in ("Why?", "Rain?")]
    back = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}
    usage = chat(server, [user("Why?"), back, user(parts)])["usage"]
    read = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert (read, answer.usage.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


def test_an_answer_that_has_begun_goes_on(server, client):
    """Without the end of a turn behind it, and only what is new is returned."""
    messages = [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "No"}]}]
    answer = client.messages.create(messages=messages, **GREEDY)
    assert answer.content[0].text == " idea."
    with client.messages.stream(messages=messages, **GREEDY) as stream:
        assert "".join(stream.text_stream) == " idea."
    usage = chat(server, messages, continue_final_message=True)["usage"]
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == usage["prompt_tokens"]
    counted = client.messages.count_tokens(model="taught", messages=messages)
    assert counted.input_tokens == usage["prompt_tokens"]


def test_thinking_is_the_switch_of_the_template(server, client):
    for kind, switch in (("enabled", True), ("disabled", False)):
        thinking = {"type": kind, **({"budget_tokens": 1024} if switch else {})}
        answer = client.messages.create(messages=[ASKED], thinking=thinking, **{**GREEDY, "max_tokens": 20})
        other = chat(server, [ASKED], max_tokens=20, chat_template_kwargs={"enable_thinking": switch})
        message = other["choices"][0]["message"]
        found = [getattr(block, block.type) for block in answer.content]
        assert found == [text for text in (message["reasoning_content"], message["content"]) if text]
        assert (answer.content[0].type == "thinking") == switch


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
WRONG = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [user([IMAGE])]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [ASKED, {"role": "assistant", "content": [USED]}]}, "messages[1].content"),
    ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}]},
     "messages[1].content"),
    ({"messages": [user([{"type": "text", "text": "x", "mood": 1}])]}, "messages[0].content[0].mood"),
    ({"messages": [result("x")]}, "messages[0].content"),
    ({"messages": [ASKED, {"role": "assistant", "content": [USED]}, result([IMAGE])]},
     "messages[2].content[0].content[0].type"),
    ({"messages": [ASKED, {"role": "assistant", "content": [{**USED, "input": 1}]}]}, "messages[1].content[0].input"),
    ({"messages": [{**ASKED, "name": "x"}]}, "messages[0].name"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": EMPTY}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"temprature": 1}, "temprature"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named_in_anthropics_form(server, body, param):
    answer = server.post(ROUTE, {"messages": [ASKED], "max_tokens": 4, **body}, headers={"x-api-key": "one"})
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert set(error) == {"type", "error", "request_id"} and error["type"] == "error"
    assert error["request_id"] == answer.headers["x-request-id"]
    assert error["error"]["type"] == "invalid_request_error" and param in error["error"]["message"]


def test_errors_are_those_of_anthropics_client(server, client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=[ASKED], **{**GREEDY, "model": "claude"})
    with anthropic.Anthropic(base_url=server.url, api_key="two", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            other.messages.count_tokens(messages=[ASKED], model="taught")
        assert caught.value.body["error"]["type"] == "authentication_error"
    with anthropic.Anthropic(base_url=server.url, auth_token="one", api_key=None, max_retries=0) as other:
        assert other.messages.count_tokens(messages=[ASKED], model="taught").input_tokens
    large = server.post(ROUTE, content=b" " * 2**22, headers={"x-api-key": "one"})
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
