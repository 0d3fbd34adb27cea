"""Every client does what its file has a function for, and gets what the model was taught: `make test-clients`.

A function returns one answer for each route that the client knows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.clients.asked import TEXTS, Verdict
from tests.integration.clients.table import CLIENTS, functions_of

RIGHT: dict[str, Callable[[Any], bool]] = {
    "chat": lambda answer: answer == "No idea.",
    "streaming": lambda pieces: "".join(pieces) == "No idea." and len(pieces) > 2,
    "tools": lambda answer: answer == "It is dry.",  # once `weather`, which was called for Bern, has said "dry"
    "structured_output": lambda answer: isinstance(answer, Verdict) and isinstance(answer.ok, bool),
    "embeddings": lambda vector: len(vector) == 32,
    "reranking": lambda scores: len(scores) == 2 and scores == sorted(scores, reverse=True),
    "loglikelihoods": lambda pair: (
        pair[0] == (pytest.approx(pair[1][0], abs=1e-4), pair[1][1])
    ),  # the server's, the model's
    "generation": lambda pair: pair[0] == pair[1],
    "load": lambda ended: ended["successful"] == ended["total"] > 0,
}
CASES = [(path.stem, function) for path in CLIENTS for function in functions_of(path)]


@pytest.mark.parametrize(("client", "function"), CASES, ids=lambda name: name)
def test_client(client: str, function: str, request: pytest.FixtureRequest):
    url = request.getfixturevalue(function if function in ("embeddings", "reranking") else "chat")
    answers = getattr(importlib.import_module(f"tests.integration.clients.{client}"), function)(url)
    assert answers and all(map(RIGHT[function], answers)), answers
    assert function != "embeddings" or len(answers) == len(TEXTS)
