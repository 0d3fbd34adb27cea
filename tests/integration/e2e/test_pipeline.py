"""Pipeline stages as a user meets them: planned, traced, verified, generated from."""

from __future__ import annotations

import re

import pytest

from nxd_infer.runtime.load import load_artifact
from tests.support.e2e.command import here, refused
from tests.support.tiny_models import write_tiny

EAGER = ("--backend", "eager", "--dtype", "float32", "--batch-sizes", "2", "--prompt-buckets", "8", "--max-len", 32)


@pytest.mark.smoke
def test_a_llama_in_two_stages_is_planned_traced_verified_and_generates(tmp_path):
    model_dir, out = write_tiny("llama", tmp_path / "model", num_hidden_layers=3), tmp_path / "artifact"
    done = here("trace", model_dir, "--out", out, "--pp", 2, "--tp", 2, *EAGER, "--plan-only")
    assert done.status == 0 and not out.exists(), done.err
    assert re.search(r"pipeline parallel degree +2", done.out) and "divided over 2 stages" in done.out
    assert re.search(
        r"0  model\.embed_tokens \.\.\. model\.layers\.1: .* of weights per rank, \d+% of the work", done.out
    )
    assert re.search(r"1  model\.layers\.2 \.\.\. lm_head: ", done.out)
    done = here("trace", model_dir, "--out", out, "--pp", 2, "--pipeline-cuts", "model.layers.0", *EAGER)
    assert done.status == 0, done.err
    assert load_artifact(out).manifest.metadata["slots"] == 4, "a batch for each stage"
    done = here("verify", out, model_dir)
    assert done.status == 0 and "(tp 1, pp 2, cpu)" in done.out, done.out + done.err
    done = here("generate", out, "def f", "--max-tokens", 8)
    assert done.status == 0 and done.out.startswith("def f"), done
    done = here("trace", model_dir, "--out", tmp_path / "a", "--pp", 4, *EAGER)
    refused(done, "pp_degree=4: 4 pipeline stages, but the model has 3 transformer layers: use at most 3")
    done = here("trace", model_dir, "--out", tmp_path / "a", "--pp", 2, "--pipeline-cuts", "model.layer.1", *EAGER)
    refused(done, "the model has no module 'model.layer.1'; did you mean model.layers.1?")
