"""A model in two pipeline stages behind a real server: every answer is the one that transformers gives."""

from __future__ import annotations

import os
import signal

from tests.support.http.http_artifacts import PROMPTS, greedy_texts, real_server, trace_tiny
from tests.support.http.http_servers import wait_for
from tests.support.http.load import TOKENS, Load, rank_pids
from tests.support.tiny_models import write_tiny

TWO_LAYERS = {"num_hidden_layers": 2}


def test_clients_are_answered_right_across_a_lost_stage_and_a_swap_of_weights(tmp_path):
    """Six clients, half of them streaming, without a pause."""
    shapes = {"batch_sizes": [1, 4], "prompt_buckets": [16], "max_len": 64, "slots": 8}
    artifact = trace_tiny("llama", "generate", tmp_path, tp=1, pp=2, model=TWO_LAYERS, **shapes)
    write_tiny("llama", tmp_path / "other", seed=1, **TWO_LAYERS)
    texts = [greedy_texts(tmp_path / name, PROMPTS, TOKENS) for name in ("model", "other")]
    options = ("--admin-key", "admin", "--weights-root", str(tmp_path), "--max-restarts", "9")
    with real_server(artifact, *options) as server:
        (card,) = server.get("/v1/models").json()["data"]
        assert (card["pp_degree"], card["tp_degree"]) == (2, 1)
        pids = rank_pids(server)
        assert len(set(pids)) == 2
        with Load(server, *texts) as load:
            wait_for(lambda: len(load.answers) > 20)
            os.kill(pids[0], signal.SIGKILL)
            wait_for(lambda: "ready again" in server.log)
            seen = len(load.answers)
            wait_for(lambda: len(load.answers) > seen + 20)
            swap = {"path": "other", "timeout": 600}
            answer = server.post("/v1/weights", swap, headers={"authorization": "Bearer admin"})
            assert answer.status_code == 200, answer.text
            seen = len(load.answers)
            wait_for(lambda: len(load.answers) > seen + 20)
        assert not load.wrong, load.wrong[:3]
        assert server.metric("nxd_engine_restarts_total") == 1
        assert server.stop() == 0
