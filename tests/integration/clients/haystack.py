"""Haystack's components for OpenAI, and an agent."""

from __future__ import annotations

from typing import Any

from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret

from tests.integration.clients.asked import MODEL, QUESTION, TEXTS, Verdict, weather

PACKAGES = ["haystack-ai"]
GIVEN: dict[str, Any] = {"model": MODEL, "api_key": Secret.from_token("x"), "max_retries": 0}
MESSAGES = [ChatMessage.from_user(QUESTION)]


def _answer(url: str, **more: Any) -> str | None:
    return OpenAIChatGenerator(**GIVEN, api_base_url=url, **more).run(MESSAGES)["replies"][0].text


def chat(url: str) -> list[str | None]:
    return [_answer(url)]


def streaming(url: str) -> list[list[str]]:
    pieces: list[str] = []
    _answer(url, streaming_callback=lambda chunk: pieces.append(chunk.content))
    return [pieces]


def tools(url: str) -> list[str | None]:
    model = OpenAIChatGenerator(**GIVEN, api_base_url=url)
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(weather)], system_prompt="Be short.")
    return [agent.run(messages=MESSAGES)["messages"][-1].text]


def structured_output(url: str) -> list[Any]:
    return [Verdict.model_validate_json(_answer(url, generation_kwargs={"response_format": Verdict}) or "")]


def embeddings(url: str) -> list[list[float]]:
    embedder = OpenAITextEmbedder(**GIVEN, api_base_url=url)
    return [embedder.run(text)["embedding"] for text in TEXTS]
