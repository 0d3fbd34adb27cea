"""The description of a model family: how to read its directory, its modules, where it may be split, its tasks.

    GPT2 = ModelSpec(
        model_types=("gpt2",),
        read_config=read_config,                                 # config.json -> a DecoderConfig
        tasks={"generate": Task(GPT2Model, GPT2Step, blocks="transformer.h")},
    )

Nothing here imports torch or a family, so a package can register its family without waiting for either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.stored import StoredWeight

if TYPE_CHECKING:
    from torch import nn

    from nxd_infer.layout import AxisPlan, WeightSource

TASKS = ("generate", "embed", "classify", "token-classification", "question-answering", "fill-mask")
"""The tasks that a server supports."""
NATIVE, TRANSFORMERS = "native", "transformers"
"""What ``model_impl`` asks for: a family's own modules, or transformers'."""
_BARE = re.compile(r"(?!.*(For[A-Z]|Head)).*Model")
"""Names of architectures without a head."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The parts of a causal language model's configuration that serving reads. Families subclass it to add fields."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context in tokens that the model was made for."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """dtype of the checkpoint's weights, by torch's name."""

    @property
    def max_length(self) -> int:
        """The longest context in tokens that is computed exactly as in the original model."""
        return self.max_position

    @property
    def usual_length(self) -> int:
        """The longest context in tokens that is traced if none is asked for, as far as it is not very long."""
        return self.max_length

    def check_length(self, length: int) -> None:
        """Raise ModelConfigError naming the limit if ``length`` exceeds it."""
        if length > self.max_length:
            raise ModelConfigError(
                f"a context of {length} tokens is beyond the {self.max_length} of this {self.model_type} model; "
                f"use at most {self.max_length} tokens"
            )

    def check_cached_length(self, max_len: int) -> None:
        """Raise ModelConfigError if a context of ``max_len`` tokens cannot be computed piece by piece with a cache.

        It can be if the output for a token depends only on the tokens before it.
        """
        self.check_length(max_len)

    def check_drafts(self, max_len: int) -> None:
        """Raise ModelConfigError if drafts cannot be verified exactly in contexts of up to ``max_len`` tokens.

        They can be if the output for a token depends only on the tokens before it.
        """


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The parts of an encoder's configuration that serving reads. Families subclass it to add fields."""

    model_type: str
    vocab_size: int
    hidden_size: int
    """Size of a token's vector, and so of an embedding."""
    num_layers: int
    max_position: int
    """Rows of the position table."""
    position_offset: int = 0
    """Row of the first token's position."""
    type_vocab_size: int = 2
    pad_token_id: int = 0
    labels: tuple[str, ...] = ()
    scores: str = "softmax"
    """Activation that turns a classifier's logits into its answer: "sigmoid", "softmax", "none" or "regression",
    which is none of a text's and a sigmoid of a pair's."""
    dtype: str = "float32"

    @property
    def max_length(self) -> int:
        """The longest input in tokens."""
        return self.max_position - self.position_offset


class Cut(NamedTuple):
    """How tensor parallelism shards the weight of a layer."""

    dimension: int
    """Dimension of the weight [outputs, inputs]: 0 is column parallel (or vocabulary parallel), 1 row parallel. That of
    experts [E, outputs, inputs] is one more."""
    axis: AxisPlan
    """How that dimension is distributed over the ranks."""


@dataclass(frozen=True)
class Task:
    """How a family performs one task."""

    module: Callable[..., nn.Module]
    """``(config, dtype, **options)``: the plain module, parallel over the current context. "generate" maps ids to
    logits; "embed" takes the options ``pooling`` and ``normalize``."""
    step: Callable[..., nn.Module]
    """The module that is traced, with the same parameters: ``module`` with one of the mixins of ``serving``."""
    blocks: str
    """Dotted name of the module list of blocks. Each takes a hidden state first and returns one, so a pipeline may be
    split before any block except the first."""
    architecture: str | tuple[str, ...] = ""
    """A directory supports the task only if one of its ``architectures`` has this suffix, or one of these; "" for
    "embed": a model with another head embeds only if it is asked to."""
    reference: Callable[..., nn.Module] | None = None
    """What ``nxd-infer verify`` compares a step with, called alike. None: the step, unsharded."""
    weights: Callable[[Path], WeightSource] | None = None
    """What reads a directory's weights under the module's names. None: :mod:`nxd_infer.hugging_face.weights`."""


@dataclass(frozen=True)
class ModelSpec:
    """A model family.

    Layers and weights have their names in the modules of ``tasks``; ``*`` stands for one component between dots.
    Raises ModelConfigError for a task that no server supports, and for ambiguous ``stored_weights``.
    """

    model_types: tuple[str, ...]
    """The values of ``model_type`` in ``config.json`` that select this family."""
    read_config: Callable[[Mapping[str, Any], str], DecoderConfig | EncoderConfig]
    """``(content of config.json, its path)``. Raises ModelConfigError naming the field of anything that cannot be run
    exactly: see :class:`nxd_models.hf.config_file.ConfigFile`."""
    tasks: Mapping[str, Task]
    """Tasks by name, the default first."""
    tensor_parallel_plan: Callable[[Any, int], Mapping[str, Cut]] | None = None
    """``(config, degree)``: the sharded layers (and weights of other names than "weight") by name. Others are
    replicated. None: unspecified."""
    stored_weights: Mapping[str, StoredWeight] = field(default_factory=dict)
    """Weights that checkpoints store under another name, as part of a larger tensor, or transposed."""
    adapter_targets: tuple[str, ...] = ()
    """Last name components of the linear layers that LoRA adapters may change."""
    model_impl: str | None = None
    """The library whose modules these are: None is the family's own, else :data:`TRANSFORMERS`."""
    encodes_prompts: bool = False
    """An encoder reads each prompt, whole, and the decoder's answer is a new text: steps are ``Seq2SeqStep``."""
    head: Mapping[str, Any] | None = None
    """Of a head that guesses for another model: the ``kind`` and the number (``features``) of the hidden states that it
    reads, as ``DecoderStep`` gives them."""
    gives_hidden_states: bool = False
    """Whether its ``decoder`` takes a list, to which it adds what each layer is given."""

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown or not self.tasks:
            raise ModelConfigError(f"{self}: tasks = {list(self.tasks)}: expected some of {', '.join(TASKS)}")
        for name, stored in self.stored_weights.items():
            if name == stored.name:
                raise ModelConfigError(
                    f"{self}: stored_weights[{name!r}] has the checkpoint's own name, so it is unclear which "
                    "of the two a file holds: name the layer otherwise in the module"
                )

    def __str__(self) -> str:
        return f"ModelSpec({', '.join(self.model_types)})"

    def pipeline_cuts(self, task: str, config: Any) -> tuple[str, ...]:
        """Return the names of the blocks before which a pipeline may be split."""
        return tuple(f"{self.tasks[task].blocks}.{i}" for i in range(1, config.num_layers))


@dataclass(frozen=True)
class ModelDirectory:
    """A model directory whose configuration was read and checked."""

    path: Path
    spec: ModelSpec
    config: DecoderConfig | EncoderConfig
    architectures: tuple[str, ...]
    raw: Mapping[str, Any]
    """The content of ``config.json``."""
    why: str = ""
    """Why transformers' module runs it and not the family of its model type; "" if that does."""
    embeds: bool = False
    """sentence-transformers wrote it as an embedding model."""

    @property
    def model_type(self) -> str:
        return self.config.model_type

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that this model supports, the default first."""
        return tuple(
            name
            for name, task in self.spec.tasks.items()
            if not task.architecture or any(known.endswith(task.architecture) for known in self.architectures)
        )

    def task(self, wanted: str | None) -> str:
        """Return ``wanted``, or what the directory is for. Raises ModelConfigError naming ``architectures`` if
        unsupported."""
        if wanted is not None and wanted not in TASKS:
            raise ModelConfigError(f"there is no task {wanted!r}; tasks are {', '.join(TASKS)}")
        found = wanted or self._default()
        if found not in self.tasks:
            what = "anything by default" if found is None else repr(found)
            raise ModelConfigError(
                f"{self.path}: a {self.model_type} model with architectures = {list(self.architectures)} cannot do "
                f"{what}; it can do {', '.join(self.tasks) or 'nothing'}"
            )
        return found

    def _default(self) -> str | None:
        """Return "embed" for a directory of sentence-transformers, else the task of the head; "embed" without one."""
        if self.embeds:
            return "embed"
        bare = all(_BARE.fullmatch(name) for name in self.architectures)
        heads = [task for task in self.tasks if task != "embed" or bare or self.spec.tasks[task].architecture]
        return heads[0] if heads else None

    def make(self, task: str, dtype: Any, *, step: bool = False, reference: bool = False, **options: Any) -> nn.Module:
        """Create the family's module for ``task``, its serving step, or what the ``reference`` of the step is, with
        newly initialized weights."""
        made = self.spec.tasks[task]
        kind = (reference and made.reference) or (made.step if step or reference else made.module)
        module = kind(self.config, dtype, **options)
        object.__setattr__(module, "nxd_stored", dict(self.spec.stored_weights))  # neither a parameter nor a module
        return module
