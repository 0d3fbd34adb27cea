"""LlamaIndex: its classes for servers that are like OpenAI's, an agent, its rerankers."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank

from tests.integration.clients.asked import MODEL, QUERY, QUESTION, TEXTS, Verdict, weather

PACKAGES = [
    "llama-index-core",
    "llama-index-llms-openai-like",
    "llama-index-embeddings-openai-like",
    "llama-index-postprocessor-cohere-rerank",
    "llama-index-postprocessor-jinaai-rerank",
]
MESSAGES = [ChatMessage(QUESTION)]


def _model(url: str) -> OpenAILike:
    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
    return OpenAILike(model=MODEL, api_base=url, api_key="x", max_retries=0, **kind)


def chat(url: str) -> list[str | None]:
    return [_model(url).chat(MESSAGES).message.content]


def streaming(url: str) -> list[list[str]]:
    return [[chunk.delta or "" for chunk in _model(url).stream_chat(MESSAGES)]]


def tools(url: str) -> list[str]:
    async def run() -> str:
        return str(await FunctionAgent(tools=[weather], llm=_model(url), system_prompt="Be short.").run(QUESTION))

    return [asyncio.run(run())]


def structured_output(url: str) -> list[Any]:
    return [_model(url).as_structured_llm(Verdict).chat(MESSAGES).raw]


def embeddings(url: str) -> list[list[float]]:
    return OpenAILikeEmbedding(model_name=MODEL, api_base=url, api_key="x").get_text_embedding_batch(TEXTS)


def reranking(url: str) -> list[list[float | None]]:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    given: dict[str, Any] = {"api_key": "x", "model": MODEL, "top_n": 2}
    rankers = [CohereRerank(base_url=url.removesuffix("/v1"), **given), JinaRerank(base_url=url, **given)]
    return [[one.score for one in ranker.postprocess_nodes(nodes, query_str=QUERY)] for ranker in rankers]
