"""Pydantic AI: agents, over OpenAI's two routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.integration.clients.asked import MODEL, QUESTION, Verdict, weather

PACKAGES = ["pydantic-ai-slim"]


def _agents(url: str, **more: Any) -> Iterator[Agent[None, Any]]:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        yield Agent(kind(MODEL, provider=OpenAIProvider(base_url=url, api_key="x")), **more)


def chat(url: str) -> list[str]:
    return [agent.run_sync(QUESTION).output for agent in _agents(url)]


def streaming(url: str) -> list[list[str]]:
    async def pieces(agent: Agent[None, Any]) -> list[str]:
        async with agent.run_stream(QUESTION) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    return [asyncio.run(pieces(agent)) for agent in _agents(url)]


def tools(url: str) -> list[str]:
    return [agent.run_sync(QUESTION).output for agent in _agents(url, tools=[weather], instructions="Be short.")]


def structured_output(url: str) -> list[Any]:
    forms = (Verdict, NativeOutput(Verdict))
    return [agent.run_sync(QUESTION).output for form in forms for agent in _agents(url, output_type=form)]
