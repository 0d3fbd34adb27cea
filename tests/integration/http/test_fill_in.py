"""A suffix: what a model that can fill in the middle writes between it and the prompt."""

from __future__ import annotations

import pytest
import tokenizers
import torch

from nxd_infer import trace
from nxd_models.serving import tasks
from nxd_server.http.openai.completions import FILL_IN
from tests.support.http.http_artifacts import ONE_LAYER, greedy_texts, real_server
from tests.support.http.http_servers import events_of, is_error
from tests.support.tiny_models import write_tiny

BEFORE, AFTER = "def f(", "): pass"


@pytest.mark.parametrize("tags", [FILL_IN[0], FILL_IN[3]], ids=["qwen", "deepseek"])
def test_what_comes_between_is_asked_for_as_the_models_were_trained(tmp_path, tags):
    prefix, suffix, middle = tags
    model_dir = write_tiny("llama", tmp_path / "model", vocab_size=320, **ONE_LAYER)
    raw = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    raw.add_special_tokens(list(tags))
    raw.save(str(model_dir / "tokenizer.json"))
    shapes = {"batch_sizes": [1], "prompt_buckets": [64], "max_len": 128}
    plan = tasks.plan(model_dir, "generate", dtype=torch.float32, model_name="model", **shapes)
    with trace.parallel_model_trace(**plan.trace_arguments(), backend="eager") as model:
        trace.parallel_model_save(model, tmp_path / "artifact")
    whole = f"{prefix}{BEFORE}{suffix}{AFTER}{middle}"
    expected = greedy_texts(model_dir, [whole], 6)[whole]
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with real_server(tmp_path / "artifact") as server:
        answer = server.post("/v1/completions", {**body, "return_token_ids": True}).json()
        (choice,) = answer["choices"]
        assert choice["text"] == expected
        assert choice["prompt_token_ids"] == raw.encode(whole).ids
        assert {raw.token_to_id(tag) for tag in tags} <= set(choice["prompt_token_ids"])
        *chunks, _ = events_of(server.post("/v1/completions", {**body, "stream": True}).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        is_error(server.post("/v1/completions", {**body, "echo": True}), 400, "suffix")
        is_error(server.post("/v1/completions", {**body, "prompt": [5, 6]}), 400, "suffix")
