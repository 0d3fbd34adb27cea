"""``/v1/responses``, asked by OpenAI's client and by openai-agents."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import openai
import pydantic
import pytest

from tests.support.http.http_artifacts import real_server
from tests.support.http.http_servers import is_error
from tests.support.http.taught_model import ASKED, CALLED, RESULT, TOOLS, VERDICT, taught_artifact

ROUTE, CHAT = "/v1/responses", "/v1/chat/completions"
FUNCTIONS = [
    {"type": "function", "name": "weather", "strict": True},
    {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}},
]
GREEDY = {"model": "taught", "temperature": 0, "max_output_tokens": 150}


@pytest.fixture(scope="module")
def server():
    keys = ("--api-key", "one", "--api-key", "two")
    with real_server(taught_artifact(), *keys, "--max-stored-responses", "20") as server:
        yield server


def client_of(server, key):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    with client_of(server, "one") as client:
        yield client


def post(server, body, key="one", **more):
    headers = {"authorization": f"Bearer {key}"}
    return server.post(ROUTE, {"temperature": 0, "max_output_tokens": 8, **body}, headers=headers, **more)


@pytest.mark.smoke
def test_a_conversation_with_a_tool_goes_on_from_what_is_stored(client):
    """Its answers are those of /v1/chat/completions for the same conversation."""
    first = client.responses.create(input="Rain?", tools=FUNCTIONS, metadata={"a": "b"}, **GREEDY)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Bern"})
    assert first.status == "completed" and first.metadata == {"a": "b"} and first.store and call.id.startswith("fc_")
    output = [{"type": "function_call_output", "call_id": call.call_id, "output": "dry"}]
    second = client.responses.create(input=output, previous_response_id=first.id, tools=FUNCTIONS, **GREEDY)
    assert second.output_text != "", "another id than in the lesson is another prompt"
    own = {**CALLED, "tool_calls": [{**CALLED["tool_calls"][0], "id": call.call_id}]}
    messages = [ASKED, own, {**RESULT, "tool_call_id": call.call_id}]
    chat = client.chat.completions.create(model="taught", messages=messages, temperature=0, tools=TOOLS, max_tokens=150)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    assert second.usage.output_tokens == chat.usage.completion_tokens
    whole = ["Rain?", {"call_id": "call_1"}, {"call_id": "call_1", "output": "dry"}]
    items = [
        {"role": "user", "content": whole[0]},
        {**call.to_dict(), "id": None, **whole[1]},
        {**output[0], **whole[2]},
    ]
    answer = client.responses.create(input=items, tools=FUNCTIONS, **GREEDY)
    assert answer.output_text == "It is dry." and answer.usage.output_tokens_details.reasoning_tokens == 0
    items[1] = {"type": "item_reference", "id": call.id}
    items[2] = output[0]
    again = client.responses.create(input=items, tools=FUNCTIONS, store=False, **GREEDY)
    assert again.output_text == second.output_text and not again.store
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
    page = client.responses.input_items.list(second.id, limit=1)
    assert page.has_more and [item.type for item in page.data] == ["function_call_output"]
    got = client.responses.retrieve(second.id)
    assert got == second
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(again.id)
    client.responses.delete(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="x", previous_response_id=second.id, **GREEDY)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_one_key_has_stored_another_does_not_see(server, client):
    stored = client.responses.create(input="Rain?", **GREEDY)
    with client_of(server, "two") as other:
        for call in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(stored.id)
    is_error(post(server, {"input": "x", "previous_response_id": stored.id}, "two"), 400, "previous_response_id")
    item = {"type": "item_reference", "id": stored.output[0].id}
    is_error(post(server, {"input": [item]}, "two"), 400, "input[0].id")
    assert server.post(ROUTE, {"input": "x"}).status_code == 401
    for _ in range(20):
        client.responses.create(input="Rain?", **{**GREEDY, "max_output_tokens": 1})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stored.id)


def names_of(events):
    """The types of the events in order, without repeated ones."""
    names = [event.type.removeprefix("response.") for event in events]
    return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


def part(name):
    return ["output_item.added", "content_part.added", f"{name}.delta", f"{name}.done", "content_part.done",
            "output_item.done"]  # fmt: skip


CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


@pytest.mark.parametrize(
    ("asked", "tools", "parts"),
    [
        ("Why?", [], part("reasoning_text") + part("output_text")),
        ("Two!", FUNCTIONS, part("output_text") + CALL_EVENTS * 2),
    ],
    ids=["reasoning", "calls"],
)
def test_a_stream_has_its_events_in_order_and_ends_as_the_whole_answer(client, asked, tools, parts):
    with client.responses.stream(input=asked, tools=tools, **GREEDY) as stream:
        seen = list(stream)
        final = stream.get_final_response()
    raw = list(client.responses.create(input=asked, tools=tools, stream=True, **GREEDY))
    assert names_of(raw) == ["created", "in_progress", *parts, "completed"]
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    assert names_of(seen) == names_of(raw)
    whole = client.responses.create(input=asked, tools=tools, **GREEDY)
    plain = [[item.to_dict(exclude_none=False) for item in one.output] for one in (final, raw[-1].response, whole)]
    for items in plain:
        for item in items:
            assert item.pop("id") and item.pop("call_id", "call")
            item.pop("parsed_arguments", None)
            for content in item.get("content") or []:
                content.pop("parsed", None)
    assert plain[0] == plain[1] == plain[2] and raw[-1].response.usage.output_tokens == whole.usage.output_tokens
    arguments = [event for event in raw if event.type == "response.function_call_arguments.delta"]
    assert len(arguments) > 10 or not tools, "as the model writes them"
    texts = {}
    for event in raw:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    for place, text in texts.items():
        (done,) = [e for e in raw if e.type == "response.output_item.done" and e.output_index == place]
        item = done.item
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)
    assert client.responses.retrieve(raw[-1].response.id).output == raw[-1].response.output


def test_reasoning_is_an_item_which_may_come_back(client):
    answer = client.responses.create(input="Why?", include=["reasoning.encrypted_content"], **GREEDY)
    thought, said = answer.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Hm.", [])
    assert said.content[0].text == answer.output_text == "So."
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    items = [
        {"role": "user", "content": "Why?"},
        thought.to_dict(),
        said.to_dict(),
        {"role": "user", "content": "Why?"},
    ]
    sent = client.responses.create(input=items, **GREEDY)
    kept = client.responses.create(input="Why?", previous_response_id=answer.id, **GREEDY)
    assert sent.output_text == kept.output_text and sent.usage.input_tokens == kept.usage.input_tokens


def test_an_answer_that_is_cut_is_incomplete(client):
    for stream in (False, True):
        answer = client.responses.create(input="Why?", stream=stream, **{**GREEDY, "max_output_tokens": 4})
        if stream:
            *_, last = answer
            assert last.type == "response.incomplete"
            answer = last.response
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[-1].status == "incomplete" and answer.usage.output_tokens == 4


class Verdict(pydantic.BaseModel):
    ok: bool


class Forecast(pydantic.BaseModel):
    place: Literal["Bern", "Basel"]


def test_answers_are_parsed(client):
    answer = client.responses.parse(input="Rain?", text_format=Verdict, **GREEDY)
    assert isinstance(answer.output_parsed, Verdict)
    tools = [openai.pydantic_function_tool(Forecast, name="forecast")]
    for choice in ("required", {"type": "function", "name": "forecast"}):
        (call,) = client.responses.parse(input="Rain?", tools=tools, tool_choice=choice, **GREEDY).output[:1]
        assert isinstance(call.parsed_arguments, Forecast)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    answer = client.responses.create(input="Rain?", tools=FUNCTIONS, tool_choice=allowed, **GREEDY)
    assert {call.name for call in answer.output} == {"clock"}
    answer = client.responses.create(input="Rain?", tools=FUNCTIONS, tool_choice="none", **GREEDY)
    assert answer.output_text == "No idea."
    form = {"format": {"type": "json_schema", "name": "verdict", "schema": VERDICT}}
    assert set(json.loads(client.responses.create(input="Rain?", text=form, **GREEDY).output_text)) == {"ok"}


def test_an_agent_calls_a_function_and_answers(server):
    from agents import Agent, FunctionTool, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    asked = []

    async def called(context, arguments):
        asked.append(json.loads(arguments))
        return "dry"

    async def run(streamed):
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="one", max_retries=0) as client:
            tools = [
                FunctionTool(name, "", {"type": "object", "properties": {}}, called, strict_json_schema=False)
                for name in ("weather", "clock")  # as the model was taught
            ]
            settings = ModelSettings(temperature=0, max_tokens=150)
            agent = Agent("a", model=OpenAIResponsesModel("taught", client), tools=tools, model_settings=settings)
            if not streamed:
                return await Runner.run(agent, "Rain?", max_turns=2)
            running = Runner.run_streamed(agent, "Rain?", max_turns=2)
            async for _ in running.stream_events():
                pass
            return running

    for streamed in (False, True):
        result = asyncio.run(run(streamed))
        kinds = [item.type for item in result.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"] and result.final_output
    assert asked == [{"city": "Bern"}] * 2


def test_the_oldest_turns_are_forgotten_to_fit(server):
    turn = [{"role": "user", "content": "Why? " * 20}, {"role": "assistant", "content": "So."}]
    items = [{"role": "developer", "content": "Short."}, *turn * 20, {"role": "user", "content": "Rain?"}]
    error = is_error(post(server, {"input": items}), 400, "input")
    assert error["code"] == "context_length_exceeded"
    answer = post(server, {"input": items, "truncation": "auto"}).json()
    assert answer["status"] in ("completed", "incomplete") and answer["usage"]["input_tokens"] <= 320


MESSAGE = {"type": "message", "role": "user", "content": "x"}
WRONG = [
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"input": 1}, "input"),
    ({"input": [1]}, "input[0]"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [MESSAGE, {**MESSAGE, "mood": 1}]}, "input[1].mood"),
    ({"input": [{**MESSAGE, "id": 1}]}, "input[0].id"),
    ({"input": [{**MESSAGE, "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}, MESSAGE]}, "input[0]"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "summary": [{"text": "x"}]}]}, "input[0].summary"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    ({"input": []}, "input"),
    ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a", "mood": 1}]}, "tools[0].mood"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}}, "tool_choice.tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"reasoning": {"effort": "none"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"truncation": "middle"}, "truncation"),
    ({"instruction": "x"}, "instruction"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(server, body, param):
    error = is_error(post(server, {"input": "x", **body}), 400)
    assert error["param"].startswith(param) and error["param"] in error["message"], error


def test_wrong_queries_of_stored_responses_are_named(server, client):
    id = client.responses.create(input="Rain?", **GREEDY).id
    headers = {"authorization": "Bearer one"}
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("before=x", "before")):
        is_error(server.get(f"{ROUTE}/{id}/input_items?{query}", headers=headers), 400, param)
    is_error(server.get(f"{ROUTE}/{id}?stream=true", headers=headers), 400, "stream")
