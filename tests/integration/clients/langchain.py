"""LangChain: its models for OpenAI's two routes, an agent, the parts of a retriever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain.agents import create_agent
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.integration.clients.asked import MESSAGE, MODEL, QUERY, QUESTION, TEXTS, Verdict, weather

PACKAGES = ["langchain", "langchain-openai", "langchain-cohere"]


def _models(url: str) -> Iterator[ChatOpenAI]:
    for responses in (False, True):
        yield ChatOpenAI(model=MODEL, base_url=url, api_key="x", max_retries=0, use_responses_api=responses)


def chat(url: str) -> list[str]:
    return [model.invoke(QUESTION).text for model in _models(url)]


def streaming(url: str) -> list[list[str]]:
    return [[chunk.text for chunk in model.stream(QUESTION)] for model in _models(url)]


def tools(url: str) -> list[str]:
    agents = [create_agent(model, tools=[weather], system_prompt="Be short.") for model in _models(url)]
    return [agent.invoke({"messages": [MESSAGE]})["messages"][-1].text for agent in agents]


def structured_output(url: str) -> list[Any]:
    methods = ("json_schema", "function_calling")
    return [model.with_structured_output(Verdict, method=m).invoke(QUESTION) for model in _models(url) for m in methods]


def embeddings(url: str) -> list[list[float]]:
    """Of the texts as they are: LangChain cuts them into tokens of OpenAI's models otherwise."""
    model = OpenAIEmbeddings(model=MODEL, base_url=url, api_key="x", check_embedding_ctx_length=False)
    return model.embed_documents(TEXTS)


def reranking(url: str) -> list[list[float]]:
    ranker = CohereRerank(base_url=url.removesuffix("/v1"), cohere_api_key="x", model=MODEL, top_n=2)
    found = ranker.compress_documents([Document(text) for text in TEXTS], QUERY)
    return [[one.metadata["relevance_score"] for one in found]]
