"""The options of a trace, each declared once: name, type, default, limits and what it does.

The signatures of ``parallel_model_trace`` and ``trace_plan`` and the options of ``nxd-infer trace`` are made of
:class:`TraceOptions`. What the options must be together is in :mod:`nxd_infer.trace.request`. This module is imported
for a command's help, so it imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.backends import registry
from nxd_infer.errors import TraceConfigError
from nxd_infer.util.options import check_each, option, option_of

if TYPE_CHECKING:
    from torch import Tensor

    from nxd_infer.checkpoint.source import Weights
    from nxd_infer.trace.request import BucketModelConfig
    from nxd_infer.util.progress import Progress


def _known_backend(_: str, backend: str) -> str:
    name = registry.canonical(backend)
    if name not in registry.BUILT_IN and name not in (known := registry.names()):
        said = f" ({registry.VARIABLE} names it)" if backend == os.environ.get(registry.VARIABLE) else ""
        raise TraceConfigError(f"there is no backend {backend!r}{said}; backends are {', '.join(known)}")
    return name


class _Reporting:
    progress: Progress | None

    def report(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Call ``progress``, if there is one."""
        if self.progress is not None:
            self.progress(stage, done, total, note)


@dataclass(eq=False)
class TraceOptions(_Reporting):
    """The arguments of ``parallel_model_trace``. Raises TraceConfigError for a value that is out of range by itself."""

    func: Callable[..., Any] = option(
        ...,
        "Returns `(model, aliases)`, or the model alone, for the rank that calls it.",
        details="`aliases` maps a buffer or parameter of the model to the index of the output that is its next value. "
        "It stays with the rank and the output is not returned. `func` runs in a spawned process per rank, so it must "
        "be importable by name.",
    )
    example_inputs: Any = option(
        ...,
        "A tensor, a tuple or list of tensors, or a dictionary of them by name; with a `bucket_config` a list of such "
        "entries, one per bucket.",
    )
    compiler_workdir: str | os.PathLike[str] | None = option(
        None,
        "Keep what is made of each graph here, in BUCKET-DIGEST, and what else the compiler writes.",
        Path,
        details="It is created if it does not exist. Graphs that the compile cache holds are not compiled again; what "
        "was made of them is kept, too. Default: all of it is removed.",
        flag="--workdir",
    )
    compiler_args: Any = option(
        None,
        "Options of the backend, as key=value,key=value.",
        details="From Python a dictionary, a list or a text of `key=value` or `--key=value`. Arguments of the Neuron "
        'compiler in its own words (`"--model-type=transformer -O1"`, or a list of such) mean nothing to the others: '
        '`trace_report["ignored_compiler_args"]` names them.',
        flag="--compiler-args",
    )
    inline_weights_to_neff: bool = option(
        True,
        "Make the weights part of the model for good: `update_weights` is refused.",
        details="They are stored once, beside the graphs, in both cases.",
    )
    bucket_config: BucketModelConfig | Mapping[str, Any] | None = option(
        None,
        "Several shapes in one model: a BucketModelConfig or a mapping of its arguments. Needs "
        "`inline_weights_to_neff=False`.",
    )
    tp_degree: int = option(1, "Tensor parallel degree: one process per rank.", int, flag="--tp", minimum=1)
    max_parallel_compilations: int | None = option(
        None,
        "At most this many ranks hold weights at a time, and at most this many graphs compile at a time.",
        int,
        details="Below `tp_degree`, `func` must not communicate. Default: all ranks at once.",
        minimum=1,
    )
    _: KW_ONLY
    batch_dim: int | None = option(
        None,
        "The dimension of every input and output along which rows are independent, 0 for most models: fewer rows than "
        "were traced are padded with zeros, and outputs are cut.",
        int,
        details="For models that declare no `nxd_inputs`, and keep no states.",
        minimum=0,
    )
    states: Sequence[str | Tensor] | None = option(
        None,
        "Further buffers (qualified names) that the model changes in place.",
        details="Those it is seen to change are found.",
    )
    spmd_mode: bool = option(
        False,
        "Every rank must trace to the same graphs. Needs `checkpoint_loader_callable` or `checkpoint`, "
        "and `inline_weights_to_neff=False`.",
    )
    checkpoint_loader_callable: Callable[[], Any] | None = option(
        None,
        "Returns the unsharded weights, as `checkpoint` takes them.",
        details="`func` then runs in this process and its parameters are never materialised; each rank's are cut from "
        "these.",
    )
    force_custom_init_on_device: bool = option(
        False, "Accepted: parameters that a loader fills are never initialised here."
    )
    serialization_path: str | os.PathLike[str] | None = option(
        None, "With `spmd_mode`, also write `tp{r}_sharded_checkpoint.safetensors` there."
    )
    backend: str = option(
        "",
        "Who compiles and runs the graphs: `nxd-infer doctor` lists them, and which is the default here.",
        check=_known_backend,
        flag="--backend",
    )
    target: str | None = option(
        None,
        "The machine to compile for; `nxd-infer doctor` lists what each backend can. Default: this machine.",
        flag="--target",
    )
    func_kwargs: Mapping[str, Any] | None = option(None, "Keyword arguments of `func` for every bucket.")
    metadata: Mapping[str, Any] | None = option(None, "What a server needs to know; stored in the artifact.")
    extra_files: Mapping[str, str | os.PathLike[str] | bytes] | None = option(
        None, "`{name in the artifact: file, or its bytes}`."
    )
    artifact_dir: str | os.PathLike[str] | None = option(
        None,
        "Where to write the artifact; replaces an existing one.",
        Path,
        details="Default: a temporary directory that `parallel_model_save` links from.",
        flag="--out",
    )
    progress: Progress | None = option(None, "Called as `progress(stage, done, total, note)`.")
    trace_timeout: float = option(7200.0, "Seconds that tracing all ranks may take.", float, above=0, unit="seconds")
    compile_timeout: float = option(
        7200.0, "Seconds that compiling each graph may take.", float, above=0, unit="seconds"
    )
    checkpoint: Weights | None = option(
        None,
        "Take the weights from this folder of save_checkpoint() checkpoints, at any degree.",
        details="In place of a loader: the folder, the path of safetensors, a dictionary, a WeightSource, or a trained "
        "model of degree 1.",
        flag="--checkpoint",
    )
    checkpoint_tag: str | None = option(
        None, "Which checkpoint in the folder. Default: the newest complete one.", flag="--tag"
    )
    pp_degree: int = option(
        1,
        "Pipeline parallel degree: the model's layers are split into this many stages, each of `tp_degree` ranks with "
        "their own weights and states. For the CPU backends.",
        int,
        flag="--pp",
        minimum=1,
    )
    pipeline_cuts: Sequence[str] | None = option(
        None,
        "Names of the last module of every stage but the last. Default: stages of equal cost, cut between layers.",
        list[str],
        flag="--pipeline-cuts",
    )
    quantize: str | None = option(
        None,
        "int8 reads half the bytes per token; int4, int4-64 or int4-128, each also with -asym, even less. "
        "`nxd-infer verify` measures the loss of accuracy.",
        details='`"int8"` holds the weights of linear layers (and a table that is tied to one) in eight bits with a '
        'scale per output. `"int4"` holds linear layers in four with a scale per 32 inputs (`"int4-64"`, `"int4-128"`: '
        'per 64, 128; `"int4-asym"`, `"int4-64-asym"`, `"int4-128-asym"`: with a zero, too), rounds their inputs to '
        "eight bits, and holds heads, tables and experts in eight. Weight files keep the traced type; ranks quantise "
        "as they load, and again when weights are updated. Small weights stay as they are.",
        flag="--quantize",
    )

    packed: bool = option(
        False,
        "Weight files hold weights as graphs read them, so that a start maps the files and copies nothing.",
        bool,
        details="For the backends that pack weights, and of the same size. What is rounded (`quantize`) is then stored "
        "rounded alone.",
        flag="--packed",
    )

    def __post_init__(self) -> None:
        check_each(self, TraceConfigError)
        self.backend = self.backend or _known_backend("", registry.default())


@dataclass(eq=False)
class RecompileOptions(_Reporting):
    """The arguments of ``parallel_model_recompile``, most of them those of a trace."""

    load_dir: str | os.PathLike[str] = option(
        ..., "A directory of `parallel_model_save`; its code need not run on this machine."
    )
    save_dir: str | os.PathLike[str] = option(
        ..., "Written completely or not at all; an existing artifact is replaced in one step."
    )
    _: KW_ONLY
    backend: str | None = option_of(
        TraceOptions, "backend", default=None, help="Who compiles and runs the graphs. Default: the artifact's own."
    )
    compiler_args: Any = option_of(TraceOptions, "compiler_args")
    target: str | None = option_of(TraceOptions, "target")
    compiler_workdir: str | os.PathLike[str] | None = option_of(TraceOptions, "compiler_workdir")
    max_parallel_compilations: int | None = option_of(
        TraceOptions, "max_parallel_compilations", help="At most this many graphs compile at a time.", details=""
    )
    replace: bool = option(True, "False rejects an existing `save_dir`.")
    progress: Progress | None = option_of(TraceOptions, "progress")
    compile_timeout: float = option_of(TraceOptions, "compile_timeout")

    def __post_init__(self) -> None:
        check_each(self, TraceConfigError)
