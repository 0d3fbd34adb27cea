"""docs/migration.md says what tests show: each row of its table, and each point below it, has its own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long import is_long

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/migration.md").read_text()

SHOWN_BY = {
    "concurrent calls of a traced model": (
        "runtime/test_model_calls.py::test_threads_start_the_ranks_once_and_each_gets_its_own_results",
    ),
    "traces whose ranks differ": ("trace/test_func_mode.py::test_ranks_whose_graphs_differ_each_run_their_own",),
    "`pad_model` on attention": ("seeds/test_padding.py::test_pad_model",),
    "`GQAQKVColumnParallelLinear(bias=True)`, the documented default": ("seeds/test_layers.py::test_qkv",),
    "`ParallelEmbedding(padding_idx=0)`": ("parallel_layers/test_embedding.py::test_padding_idx_zero_is_not_ignored",),
    "embeddings in float16 at tp > 1": ("parallel_layers/test_embedding.py::test_low_precision_is_kept",),
    "an id outside the vocabulary at tp > 1": ("parallel_layers/test_embedding.py::test_id_outside_vocabulary",),
    "a bias at tp > 1": ("parallel_layers/test_layer_objects.py::test_initialisation_draws_the_same_at_every_degree",),
    "a degree larger than the world": (
        "unit/test_parallel_state.py::test_a_degree_above_the_world_is_an_error_and_not_clamped",
    ),
    "building a layer before initialising": (
        "parallel_layers/test_layer_objects.py::test_uninitialised_is_degree_one",
    ),
    "`parallel_model_load` with a stray file in the directory": (
        "artifact/test_load.py::test_stray_files_are_ignored",
    ),
    "two traces on one host": ("trace/test_func_mode.py::test_two_traces_at_once_do_not_meet",),
    "loading checkpoints": ("parallel_layers/test_checkpointing.py::test_code_in_a_checkpoint_is_never_run",),
    "`load_checkpoint` at other degrees": ("checkpoint/test_neuronx_files.py::test_training_goes_on_at_any_degree",),
    "`load_checkpoint` at a job's first start": ("seeds/test_training.py::test_sample_usage",),
    "`NxDPPModel` of a Hugging Face model": ("pipeline/test_hugging_face.py::test_models_in_stages",),
    "`trace_file_path` of a pipeline": ("pipeline/test_model.py::test_a_timeline",),
    "`run_train(*args)` of a pipeline": ("pipeline/test_tracing.py::test_on_two_stages",),
    "a sharded optimizer's files over pipeline stages": ("pipeline/test_checkpoints.py::test_to_other_degrees",),
    "the newest checkpoint": (
        "checkpoint/test_numbers.py::test_a_new_save_is_above_whatever_is_there",
        "checkpoint/test_damage.py::test_damage_is_named",
    ),
}


DIFFERS = {
    "`ModelBuilder` is not here": (
        "backends/test_inductor.py::test_ranks_share_one_graph_that_is_compiled_once_and_never_again",
    ),
    "`TensorParallelModel` is the class": ("runtime/test_model_calls.py::test_a_model_of_processes_is_not_copied",),
    "An artifact is a directory": ("artifact/test_load.py::test_what_is_no_artifact",),
    "`NxDPPModel` traces a graph only with `tracer_cls`": (
        "pipeline/test_tracing.py::test_what_is_traced_runs_as_before",
        "pipeline/test_tracing.py::test_what_has_no_effect_is_said_once",
    ),
    "`inline_weights_to_neff=True`": (
        "runtime/test_new_weights.py::test_inlined_weights_are_not_swapped",
        "seeds/test_tracing.py::test_inlined_weights_have_no_buckets",
    ),
    "`compiler_args`": (
        "backends/test_inductor.py::test_ranks_share_one_graph_that_is_compiled_once_and_never_again",
        "trace/test_trace_arguments.py::test_contradictions_are_refused",
    ),
}
NAMES = (
    "parallel_layers/test_compat.py::test_a_real_package_is_not_hidden",
    "parallel_layers/test_compat.py::test_torch_neuronx_is_stood_in_for_where_it_is_absent_and_never_hidden",
)
"""What is said of packages that are installed."""


@pytest.mark.check
def test_every_row_and_every_difference_has_its_tests():
    rows = [row.split(" | ")[0].removeprefix("| ") for row in re.findall(r"^\| .* \|$", TEXT, re.MULTILINE)][1:]
    assert rows == list(SHOWN_BY)
    points = re.findall(r"^- (.*)", TEXT.partition("## What differs on purpose")[2], re.MULTILINE)
    assert len(points) == len(DIFFERS)
    assert all(point.startswith(start) for point, start in zip(points, DIFFERS, strict=True)), points
    shown = [*zip(rows, SHOWN_BY.values(), strict=True), *zip(points, DIFFERS.values(), strict=True), ("", NAMES)]
    for said, tests in shown:
        for test in tests:
            require_shown(said, test)


def require_shown(said: str, test: str) -> None:
    """The test is one of ``make test``, in a file that has one of the names in the line of the page, if it has any."""
    path, _, name = test.partition("::")
    source = (ROOT / "tests" / path).read_text()
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found and name.startswith("test_") and Path(path).name.startswith("test_"), f"{test} is no test"
    marks = " ".join(ast.unparse(mark) for mark in found[0].decorator_list)
    assert not re.search("skip|xfail", marks) and not is_long(f"tests/{test}"), f"{test} does not run in make test"
    named = re.findall(r"[A-Za-z]\w{4,}", " ".join(re.findall(r"`[^`]+`", said)))
    assert not named or any(re.search(rf"\b{one}\b", source) for one in named), f"{test} says nothing of {named}"


@pytest.mark.check
@pytest.mark.parametrize(
    ("said", "test", "why"),
    [
        ("", "seeds/test_padding.py::test_pad_models", "is no test"),
        ("", "ranks.py::run_ranks", "is no test"),
        ("", "models/test_foreign_family.py::test_the_command_line_traces_verifies_and_serves_it", "does not run"),
        ("`trace_file_path` of a pipeline", "seeds/test_padding.py::test_pad_model", "says nothing of"),
    ],
)
def test_what_shows_nothing_is_told(said: str, test: str, why: str):
    with pytest.raises(AssertionError, match=why):
        require_shown(said, test)


SCRIPT = """
import torch
from neuronx_distributed.parallel_layers import ColumnParallelLinear
from neuronx_distributed.trace import parallel_model_trace
from torch_neuronx import BucketModelConfig
from beside import SIZE

def build():
    return ColumnParallelLinear(SIZE, SIZE), {}

if __name__ == "__main__":
    model = parallel_model_trace(build, torch.ones(1, SIZE), tp_degree=2, backend="eager")
    print("traced", tuple(model(torch.ones(1, SIZE)).shape))
    model.close()
"""


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_the_commands_of_the_page_start_a_script_as_it_is(launcher: str, tmp_path: Path):
    """One that traces, which imports it again in every rank, with a module of its own beside it."""
    (command,) = re.findall(rf"`({launcher} -m nxd_infer\.compat script\.py)`", TEXT)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("SIZE = 4\n")
    program, *arguments = command.split()
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout == "traced (1, 4)\n", done.stderr
