"""A client that openapi-python-client makes of the server's /openapi.json."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from tests.integration.clients.asked import MESSAGE, MODEL, QUERY, TEXTS

PACKAGES = ["openapi-python-client"]


@functools.cache
def _made(url: str) -> str:
    """The name of a package of its own."""
    place = Path(tempfile.mkdtemp())
    document = place / "openapi.json"
    document.write_text(httpx.get(f"{url.removesuffix('/v1')}/openapi.json").text)
    (place / "settings.yaml").write_text(json.dumps({"post_hooks": []}))
    name = f"made_{place.name}"
    command = ["openapi-python-client", "generate", "--meta", "none", "--fail-on-warning", "--path", document]
    more = ["--output-path", place / name, "--config", place / "settings.yaml"]
    subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:], *more], check=True, timeout=120)
    subprocess.run([sys.executable, "-m", "compileall", "-q", place / name], check=True, timeout=120)
    sys.path.append(str(place))
    return name


def _ask(url: str, operation: str, body: str, **fields: Any) -> Any:
    name = _made(url)
    client = importlib.import_module(name).Client(base_url=url.removesuffix("/v1"))
    form = getattr(importlib.import_module(f"{name}.models"), body)
    route = importlib.import_module(f"{name}.api.default.{operation}")
    return route.sync(client=client, body=form.from_dict(fields))


def chat(url: str) -> list[str]:
    given = {"model": MODEL, "max_tokens": 40}
    answer = _ask(url, "chat_v_1_chat_completions_post", "ChatBody", messages=[MESSAGE], **given)
    message = _ask(url, "messages_v_1_messages_post", "MessagesBody", messages=[MESSAGE], **given)
    return [answer.choices[0].message.content, message.content[-1].text]


def embeddings(url: str) -> list[list[float]]:
    return [one.embedding for one in _ask(url, "embedding_v_1_embeddings_post", "EmbeddingBody", input=TEXTS).data]


def reranking(url: str) -> list[list[float]]:
    answer = _ask(url, "rerank_v_1_rerank_post", "RerankBody", query=QUERY, documents=TEXTS, top_n=2)
    return [[one.relevance_score for one in answer.results]]
