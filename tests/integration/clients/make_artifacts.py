"""Trace the models that clients ask: ``python -m tests.integration.clients.make_artifacts DIRECTORY``, of .venv."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from nxd_infer import trace
from nxd_models.serving import tasks
from nxd_server.text.conversation import shown_id
from tests.support.http.taught_model import SHOWN, TEMPLATE, taught
from tests.support.tiny_models import write_tiny

LOOP, CONTENT = "{% for m in messages %}", "{{ m['content'] }}"
CHANGES = {
    LOOP: "{% for m in messages if m['role'] != 'system' %}",
    "{{ m['tool_call_id'] }}": shown_id("call_1", short=True),
    CONTENT: "{{ m['content'] | replace('\"', '') }}",
}
"""However a client describes its tools, names a call and quotes a result, the prompt is that of the lesson."""
MAX_LEN = 2048


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def make(place: Path) -> None:
    """Write ``chat`` (traced of ``model``), ``embeddings`` and ``reranking`` below ``place``."""
    chat = taught(place / "model")
    changed(chat / "config.json", max_position_embeddings=MAX_LEN)
    changed(chat / "generation_config.json", do_sample=False)
    template = "{% if tools %}" + SHOWN + "{% endif %}" + TEMPLATE[TEMPLATE.index(LOOP) :]
    for old, new in CHANGES.items():
        assert old in template
        template = template.replace(old, new)
    (chat / "chat_template.jinja").write_text(template)
    one = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
    trace_it(chat, "generate", place / "chat", prompt_buckets=[64, 256], max_len=MAX_LEN)
    trace_it(write_tiny("bert", place / "bert"), "embed", place / "embeddings", prompt_buckets=[64])
    trace_it(
        write_tiny("bert_classifier", place / "cross", **one), "classify", place / "reranking", prompt_buckets=[64]
    )


def trace_it(model_dir: Path, task: str, artifact: Path, **shapes: Any) -> None:
    plan = tasks.plan(model_dir, task, dtype=torch.float32, model_name="model", batch_sizes=[4], **shapes)
    with trace.parallel_model_trace(**plan.trace_arguments(), backend="eager") as model:
        trace.parallel_model_save(model, artifact)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
