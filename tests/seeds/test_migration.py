"""docs/migration.md says what tests show: each row of its table has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/migration.md").read_text()

SHOWN_BY = {
    "concurrent calls of a traced model": (
        "trace/test_model_calls.py",
        "test_a_thousand_concurrent_calls_each_get_their_own_result",
    ),
    "traces whose ranks differ": ("trace/test_func_mode.py", "test_ranks_whose_graphs_differ_each_run_their_own"),
    "`pad_model` on attention": ("seeds/test_padding.py", "test_pad_model"),
    "`GQAQKVColumnParallelLinear(bias=True)`, the documented default": ("seeds/test_layers.py", "test_qkv"),
    "`ParallelEmbedding(padding_idx=0)`": ("layers/test_embedding.py", "test_padding_idx_zero_is_not_ignored"),
    "embeddings in float16 at tp > 1": ("layers/test_embedding.py", "test_low_precision_is_kept"),
    "an id outside the vocabulary at tp > 1": ("layers/test_embedding.py", "test_id_outside_vocabulary"),
    "a bias at tp > 1": ("layers/test_layer_objects.py", "test_initialisation_draws_the_same_at_every_degree"),
    "a degree larger than the world": (
        "unit/test_parallel_state.py",
        "test_a_degree_above_the_world_is_an_error_and_not_clamped",
    ),
    "building a layer before initialising": ("layers/test_layer_objects.py", "test_uninitialised_is_degree_one"),
    "`parallel_model_load` with a stray file in the directory": (
        "trace/test_artifact_load.py",
        "test_stray_files_are_ignored",
    ),
    "two traces on one host": ("trace/test_func_mode.py", "test_two_traces_at_once_do_not_meet"),
    "loading checkpoints": ("layers/test_checkpointing.py", "test_code_in_a_checkpoint_is_never_run"),
    "`load_checkpoint` at other degrees": ("trainer/test_reference_files.py", "test_training_goes_on_at_any_degree"),
    "`load_checkpoint` at a job's first start": ("seeds/test_training.py", "test_sample_usage"),
    "the newest checkpoint": ("trainer/test_checkpoint_numbers.py", "test_a_new_save_is_above_whatever_is_there"),
}


@pytest.mark.check
def test_every_row_has_its_test():
    rows = [row.split(" | ")[0].removeprefix("| ") for row in re.findall(r"^\| .* \|$", TEXT, re.MULTILINE)][1:]
    assert rows == list(SHOWN_BY)
    for path, name in SHOWN_BY.values():
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (path, name)
