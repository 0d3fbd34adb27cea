"""One workflow: train on two ranks, save, trace at another degree, serve, and swap a later checkpoint in."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nxd_infer.checkpoint.api import save_checkpoint
from nxd_models import registry
from nxd_server import LLM, SamplingParams
from nxd_server.text.tokenizer import Tokenizer
from tests.support.e2e.command import here
from tests.support.http.http_artifacts import ONE_LAYER, real_server
from tests.support.http.http_servers import is_error
from tests.support.ranks import run_ranks
from tests.support.tiny_models import VOCAB_SIZE, write_tiny
from tests.support.trainer.jobs import training

TOKENS = 4
PROMPTS = torch.randint(5, VOCAB_SIZE, (40, 8), generator=torch.Generator().manual_seed(1))
ADMIN = {"authorization": "Bearer root"}


def greedy(model, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens [rows, TOKENS] from the whole prefix each time, and each row's smallest lead over the
    second likeliest."""
    model.eval()
    ids, leads = prompts, torch.full([len(prompts)], torch.inf)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(input_ids=ids)[:, -1]
            best = logits.topk(2)
            leads = torch.minimum(leads, best.values[:, 0] - best.values[:, 1])
            ids = torch.cat([ids, best.indices[:, :1]], 1)
    model.train()
    return ids[:, prompts.shape[1] :], leads


def tuned(model_dir: str, root: str) -> list[tuple[Tensor, Tensor]]:
    """Fine-tune, save "first", go on, save "second"; what the model says at both moments."""
    model, optimizer = training(
        partial(registry.load_model, model_dir, dtype=torch.float32), optimizer_config={"zero_one_enabled": True}
    )
    answers = []
    for tag in ("first", "second"):
        for step in range(2):
            ids = torch.randint(5, VOCAB_SIZE, (4, 16), generator=torch.Generator().manual_seed(step))
            model.run_train(input_ids=ids, labels=ids)
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(root, tag, model, optimizer)
        answers.append(greedy(model, PROMPTS))
    return answers


def trained(workplace: Path) -> list[dict[int, str]]:
    """By version: the text after each prompt whose answer is clear and differs between the two."""
    model_dir, root = write_tiny("llama", workplace / "model", **ONE_LAYER), workplace / "root" / "ckpts"
    answers, _ = run_ranks(tuned, 2, str(model_dir), str(root), tp=2)
    tokenizer = Tokenizer.from_dir(model_dir)
    found = [{row: tokenizer.decode(ids.tolist()) for row, ids in enumerate(tokens)} for tokens, _ in answers]
    clear = [row for row in range(len(PROMPTS)) if all(leads[row] > 1e-3 for _, leads in answers)]
    kept = [row for row in clear if found[0][row] != found[1][row]]
    assert len(kept) >= 20, (len(clear), len(kept))
    return [{row: by_row[row] for row in kept} for by_row in found]


def ask(server, row: int) -> tuple[str, int]:
    """The text after a prompt, and the version that the answer names."""
    body = {"prompt": PROMPTS[row].tolist(), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["weight_version"]


def swap(server, path: str, **more):
    return server.post("/v1/weights", {"path": path, **more}, headers=ADMIN, timeout=600)


@pytest.mark.smoke
def test_trained_traced_served_and_swapped(tmp_path):
    artifact, root = tmp_path / "artifact", tmp_path / "root"
    first, second = trained(tmp_path)
    write_tiny("llama", root / "wider", intermediate_size=64, **ONE_LAYER)
    options = ("--tp", "1", "--backend", "eager", "--dtype", "float32", "--batch-sizes", "1,8", "--max-len", "64")
    source = ("--checkpoint", root / "ckpts", "--tag", "first")
    done = here("trace", tmp_path / "model", *source, *options, "--prompt-buckets", "8", "--out", artifact)
    assert done.status == 0, done.err

    keys = ("--admin-key", "root", "--weights-root", str(root), "--recovery-timeout", "120")
    with real_server(artifact, *keys) as server:
        rows = list(first)
        assert [ask(server, row) for row in rows[:3]] == [(first[row], 0) for row in rows[:3]]

        # What does not fit, or is not there, changes nothing.
        error = is_error(swap(server, "wider"), 400, "path", "weights_refused")
        assert "model.layers.0.mlp.down_proj.weight has shape [32, 64], traced with [32, 48]" in error["message"]
        error = is_error(swap(server, "ckpts", tag="third"), 400, "tag", "weights_refused")
        assert "'first', 'second'" in error["message"]

        answer = swap(server, "ckpts", tag="second", timeout=600)
        assert answer.status_code == 200 and answer.json()["version"] == 1, answer.text
        assert [ask(server, row) for row in rows[:3]] == [(second[row], 1) for row in rows[:3]]

        # Ranks that are started again have the weights of before.
        (rank,) = server.get("/health").json()["ranks"]
        os.kill(rank["pid"], signal.SIGKILL)
        server.wait_metric("nxd_engine_restarts_total", 1.0)
        server.wait_ready()
        assert ask(server, rows[0]) == (second[rows[0]], 1)

    # The same in process: the artifact has kept its own weights.
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    prompts = [PROMPTS[row].tolist() for row in rows[:4]]
    with LLM(artifact) as llm:
        assert [output.outputs[0].text for output in llm.generate(prompts, params)] == [first[row] for row in rows[:4]]
        assert llm.update_weights(root / "ckpts", tag="second") == 1
        assert [output.outputs[0].text for output in llm.generate(prompts, params)] == [second[row] for row in rows[:4]]
