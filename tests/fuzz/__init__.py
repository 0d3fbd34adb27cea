"""Fuzzing of every parser of what others have written: ``make fuzz``, and the corpus in the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fuzz import artifacts, checkpoints, recipes, requests, texts
from tests.fuzz.target import Target

TARGETS: dict[str, Callable[[Path], Target]] = {
    "manifest": artifacts.manifest, "graph": artifacts.graph, "weights": artifacts.weights,
    "checkpoint": checkpoints.ours, "values": checkpoints.values, "reference": checkpoints.reference,
    "body": requests.body, "predict": requests.predict,
    "template": texts.template, "grammar": texts.grammar, "tokenizer": texts.tokenizer,
    "tokenizer_files": texts.tokenizer_files,
    "recipe": recipes.recipe, "jsonl": recipes.jsonl, "megatron": recipes.megatron,
}  # fmt: skip
"""By name; each is made for a folder of its own."""
