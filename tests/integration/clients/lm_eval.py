"""lm-eval: tasks of a few documents over the server, and by its own backend for transformers' models."""

from __future__ import annotations

import os
from typing import Any

import datasets
import lm_eval
from lm_eval.tasks import TaskManager

from tests.integration.clients.asked import MODEL, QUESTION, TEXTS

PACKAGES = ["lm-eval"]
DOCUMENTS = [{"text": text, "answer": place} for place, text in enumerate(TEXTS)]
TASK: dict[str, Any] = {
    "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(DOCUMENTS)},
    "test_split": "test",
    "doc_to_text": f"<|user|>{QUESTION} {{{{text}}}}<|assistant|>",
    "doc_to_target": "answer",
}
CHOICE = {"task": "choice", "output_type": "multiple_choice", "doc_to_choice": ["No idea.", " a file", "1"]}
UNTIL = {"task": "until", "output_type": "generate_until", "generation_kwargs": {"until": ["."], "max_gen_toks": 24}}


def _both(url: str, task: dict[str, Any]) -> list[tuple[Any, Any]]:
    """What lm-eval gets for each request, from the server and from transformers' own model."""
    folder = os.environ["MODEL_FOLDER"]
    here = {"pretrained": folder, "device": "cpu", "dtype": "float32"}
    there = {"base_url": f"{url}/completions", "model": MODEL, "tokenizer": folder, "tokenizer_backend": "huggingface"}
    found = []
    for backend, given in (("local-completions", there), ("hf", here)):
        given |= {"add_bos_token": True, "max_length": 512}  # else one puts a first token before a prompt, one does not
        tasks = TaskManager(include_defaults=False)
        results = lm_eval.simple_evaluate(backend, given, tasks=[TASK | task], task_manager=tasks, bootstrap_iters=0)
        assert results is not None
        found.append([one for sample in results["samples"][task["task"]] for (one,) in sample["resps"]])
    return list(zip(*found, strict=True))


def loglikelihoods(url: str) -> list[tuple[Any, Any]]:
    """Each is that of a choice, and whether it is the greedy answer."""
    return _both(url, CHOICE)


def generation(url: str) -> list[tuple[Any, Any]]:
    return _both(url, UNTIL)
