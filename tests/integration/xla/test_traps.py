"""What torch-xla does without a word, or at the cost of the process, and how this package gets by."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.integration.xla.rig import in_a_process, require

require()

from nxd_infer import comm, trace  # noqa: E402
from nxd_infer.backends.compile.pool import compile_graphs  # noqa: E402
from nxd_infer.backends.hlo.files import HLO_FILE  # noqa: E402
from nxd_infer.backends.hlo.parts import lower_graphs  # noqa: E402
from nxd_infer.backends.neuron.lower import lower_directory  # noqa: E402
from nxd_infer.context import current_context, make_context, use_context  # noqa: E402
from nxd_infer.errors import TraceError  # noqa: E402
from nxd_infer.graph.stored import write_graph  # noqa: E402
from nxd_infer.trace.recompile import parallel_model_recompile  # noqa: E402
from tests.integration.xla.cases import lower, write_ranks  # noqa: E402
from tests.support import traced_models as models  # noqa: E402
from tests.support.backends.canonical import Rank, ranks_of  # noqa: E402


def ranks(build: Callable[[], nn.Module], degree: int, example: tuple[Tensor, ...]) -> list[Rank]:
    """A module's graph on every rank."""
    found = []
    for rank in range(degree):
        with use_context(make_context(degree, rank, tp=degree, collectives="none")):
            module = build().eval()
            found.append(Rank(module, example, getattr(module, "nxd_states", ()), rank))
    return found


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def calls(function: Callable[..., Tensor], x: Tensor) -> Rank:
    return ranks(lambda: Calls(function), 1, (x,))[0]


def written(rank: Rank, directory: Path) -> Path:
    (lowered,) = lower_graphs([rank.graph])
    lowered.ir = rank.graph.ir()
    return write_graph(lowered, directory)


# --- replicas -----------------------------------------------------------------------------------------


def test_collectives_are_done_and_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that nobody has announced have a world of one, in which an all_reduce does nothing; and the program
    of each holds one of the threads of torch_xla's pool, which has one for each processor."""
    monkeypatch.setenv("XLA_THREAD_POOL_SIZE", "1")
    given = [torch.arange(8.0).reshape(2, 4) + rank for rank in range(4)]
    total = torch.stack(given).sum(0)
    for rank, found in enumerate(in_a_process("run_trap", "collectives")):
        wanted = [total, given[3], torch.cat(given, 1), total[:, rank : rank + 1], given[2], torch.cat(given) > 5]
        assert found == [tensor.tolist() for tensor in wanted]


TOTAL = [16.0 * 6.0, [0.0, 16.0, 32.0, 48.0], True]
TRAPS: dict[str, object] = {
    # torch_xla multiplies a gathered value into the token, which it adds to what is exchanged next.
    "infinity": [[2.0, 2.0]] * 2,
    "many": [[1.0] * 4] * 5,
    # With aliasing, which is the default, the first step that takes a tensor's memory waits for ever.
    "in_place": [40.0, 40.0],
    "raises": ["ValueError", "ValueError"],
    # Reading compiles on the spot; a view is cut out in the program that reads it, at another place on each rank.
    "reads": [[6.0, *TOTAL], [10.0, *TOTAL]],
}


@pytest.mark.parametrize("name", TRAPS)
def test_what_replicas_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_ENABLE_PARAM_ALIASING", "1")
    assert in_a_process("run_trap", name) == TRAPS[name]


def test_replicas_that_wait_in_vain_end_their_process() -> None:
    """So they have one of their own, whose end and last words the supervisor tells."""
    said = in_a_process("run_trap", "stuck", status=-signal.SIGABRT)
    assert "Termination timeout" in said


def test_replicas_that_train_apart_are_told() -> None:
    """Where they run different programs torch_xla ends the process."""
    different, alone = in_a_process("run_trap", "others")
    assert different[0] == "CollectiveError" and "all_reduce" in different[1] and "all_gather" in different[1]
    assert alone == [
        "CollectiveTimeoutError",
        "of the ranks [0, 1] of axis 'tp', one failed or did not reach a collective within 2 s",
    ]


def test_devices_are_counted_once() -> None:
    (said,) = in_a_process("run_trap", "counted")
    assert "runs a model of degree 1" in said and "is of degree 2: load it in another process" in said
    said = in_a_process("run_trap", "started")
    assert "with 1 devices, and the artifact needs 2" in said


# --- programs -----------------------------------------------------------------------------------------


class Scalars(nn.Module):
    """A state and a weight without dimensions: 0 on one rank, 1 on the other, where torch_xla writes both down."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(float(current_context().axis("tp").rank)))
        self.register_buffer("count", torch.tensor(0.0))
        self.nxd_states = ("count",)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.count = self.count + scale * 0.5
        return comm.all_reduce(x * self.factor + self.count, current_context())


def test_one_program_runs_on_all_ranks(tmp_path: Path) -> None:
    """Tensors without dimensions are data; and where a vocabulary does not divide, only the last rank holds padding."""
    built = {
        "scalars": ranks(Scalars, 2, (torch.ones(3), torch.tensor(1.0))),
        "odd": ranks_of("llama", 2, tmp_path, vocabulary=289),
    }
    for name, each in built.items():
        assert len(set(write_ranks(each, tmp_path / "cases" / name).hlo)) == 1
    done = in_a_process("run_cases", str(tmp_path / "cases"))
    assert done["cases"]["scalars"] == {"outputs": 0.0, "states": 0.0}
    assert max(done["cases"]["odd"].values()) <= 1e-5
    assert done["compiled"] == 2


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.bitwise_left_shift(x.int(), 1), r"computes int64\[4\] where torch computes int32\[4\]"),
        (lambda x: torch.nan_to_num(x, posinf=float("inf")), "must be in the range"),
    ],
    ids=["a shift that widens", "an infinity for another"],
)
def test_what_xla_does_otherwise_is_refused(function: Callable[..., Tensor], words: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=words):
        lower(calls(function, torch.ones(4)), tmp_path)


def test_an_operator_that_ends_the_process_is_named(tmp_path: Path) -> None:
    """Where XLA has none, torch_xla runs the host's, on memory that a tensor has not got while a graph is lowered."""
    directory = written(calls(lambda x: torch.bucketize(x, x), torch.ones(4)), tmp_path / "graph")
    with pytest.raises(TraceError, match=r"was ended by SIG(.|\n)*lowering aten\.bucketize\.Tensor"):
        compile_graphs("xla", [directory], {})


def test_a_type_that_the_neuron_runtime_has_no_tensors_of_is_refused(tmp_path: Path) -> None:
    """Cores compute in it, so that the compiler takes it, and loading would be the first to find out."""
    directory = written(calls(lambda x: x.float() * 2, torch.ones(4, dtype=torch.uint32)), tmp_path / "graph")
    with pytest.raises(TraceError, match=r"is uint32\[4\], and the Neuron runtime has no tensors of that type: take"):
        lower_directory(directory)


def test_variables_of_training_scripts_do_not_change_the_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS' scripts for Trainium set them, and torch_xla writes bfloat16, or 32 bits, where the graph has others."""
    rank = calls(lambda x: (x @ x)[torch.arange(2)] + 0.3, torch.ones(4, 4))
    directories = [written(rank, tmp_path / name) for name in ("without", "with")]
    compile_graphs("xla", directories[:1], {})
    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_32BIT_LONG"):
        monkeypatch.setenv(name, "1")
    compile_graphs("xla", directories[1:], {})
    without, given = ((directory / HLO_FILE).read_bytes() for directory in directories)
    assert given == without


# --- models whose ranks need different graphs, which replicas cannot run ------------------------------


def test_ranks_with_different_graphs_are_refused(tmp_path: Path) -> None:
    def traced(backend: str) -> trace.TensorParallelModel:
        return trace.parallel_model_trace(
            models.baked_rank, (torch.ones(2, 4),), tp_degree=2, backend=backend, inline_weights_to_neff=False
        )

    with pytest.raises(TraceError, match=r"another graph on rank 1 than on rank 0, which the xla backend forbids"):
        traced("xla")
    with traced("eager") as model:
        trace.parallel_model_save(model, tmp_path / "eager")
    with pytest.raises(TraceError, match=r"have 2 graphs, and the xla backend runs one on all of them"):
        parallel_model_recompile(tmp_path / "eager", tmp_path / "xla", backend="xla")
