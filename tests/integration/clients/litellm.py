"""LiteLLM: its provider for servers that are like OpenAI's, and those that rerank."""

from __future__ import annotations

from typing import Any

import litellm

from tests.integration.clients.asked import MESSAGE, MODEL, QUERY, QUESTION, TEXTS, WEATHER, Verdict

PACKAGES = ["litellm"]
NAME = f"openai/{MODEL}"


def _answer(url: str, **more: Any) -> Any:
    return litellm.completion(NAME, [MESSAGE], api_base=url, api_key="x", **more)


def chat(url: str) -> list[str]:
    response = litellm.responses(model=NAME, input=QUESTION, api_base=url, api_key="x")
    return [_answer(url).choices[0].message.content, response.output[-1].content[0].text]


def streaming(url: str) -> list[list[str]]:
    return [[chunk.choices[0].delta.content or "" for chunk in _answer(url, stream=True)]]


def tools(url: str) -> list[str]:
    said = _answer(url, tools=[WEATHER]).choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "dry"}
    messages = [MESSAGE, said, result]
    answer = litellm.completion(NAME, messages, api_base=url, api_key="x", tools=[WEATHER])
    return [answer.choices[0].message.content]


def structured_output(url: str) -> list[Any]:
    return [Verdict.model_validate_json(_answer(url, response_format=Verdict).choices[0].message.content)]


def embeddings(url: str) -> list[list[float]]:
    return [one["embedding"] for one in litellm.embedding(NAME, TEXTS, api_base=url, api_key="x").data]


def reranking(url: str) -> list[list[float]]:
    given: dict[str, Any] = {"top_n": 2, "api_base": url.removesuffix("/v1"), "api_key": "x"}
    providers = ("hosted_vllm", "cohere", "jina_ai")
    answers = [litellm.rerank(f"{name}/{MODEL}", QUERY, TEXTS, **given) for name in providers]
    return [[one["relevance_score"] for one in answer.results] for answer in answers]
