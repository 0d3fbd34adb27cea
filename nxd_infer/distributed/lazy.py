"""Load a model without its weights: each rank reads only its part of them, when the model is parallelized."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxd_infer.checkpoint.peft_adapters import plain_name
from nxd_infer.errors import CheckpointError, MissingPackageError, ParallelConfigError
from nxd_infer.hugging_face.stored import StoredWeight
from nxd_infer.hugging_face.weights import HuggingFaceSource, weights
from nxd_infer.layout import RemappedSource, WeightSource
from nxd_infer.parallel_layers.base import parameters_on_meta
from nxd_infer.util.options import whole_number

WEIGHTS = "_nxd_stored_weights"
"""Attribute of a lazily loaded model: its :class:`StoredWeights`."""
_REFUSED = (
    "gguf_file",
    "quantization_config",
    "state_dict",
    "from_tf",
    "from_flax",
    "output_loading_info",
    "tp_plan",
    "device_mesh",
    "variant",
)
_IGNORED = ("low_cpu_mem_usage", "use_safetensors", "weights_only", "ignore_mismatched_sizes", "local_files_only")
_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision")
RENAMED = {
    "lm_head.weight": StoredWeight("embed_out.weight"),
    "embed_out.weight": StoredWeight("lm_head.weight"),
}
"""Names that changed between releases of transformers."""

_lazy: ContextVar[bool] = ContextVar("nxd_lazy_load", default=False)


@dataclass(frozen=True)
class StoredWeights:
    """The files of a model that was loaded without them."""

    folder: Path
    prefix: str
    """``base_model_prefix``: models with a head have it before their names, and those without do not."""

    def view(self, names: list[str]) -> WeightSource:
        """Return those of ``names`` that the files have."""
        source: HuggingFaceSource = weights(self.folder, prefixes=(f"{self.prefix}.",) if self.prefix else ())
        plain = {name: plain_name(name) for name in names}
        found = source.view(plain.values(), RENAMED)
        there = set(found.keys())
        return RemappedSource(found, {name: own for name, own in plain.items() if own in there})


@contextlib.contextmanager
def lazy_load_for_parallelism(tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> Iterator[None]:
    """Make ``from_pretrained`` return models without weights, for ``Parallelizer.parallelize`` to read.

    Inside, ``PreTrainedModel.from_pretrained`` (also through ``AutoModel...``) reads the configuration only: all
    parameters are on the meta device, and the files are remembered. Parallelizing then reads the rank's part, one
    tensor at a time. Only the caller's thread is concerned. If both sizes are 1, loading is not lazy.

    Raises MissingPackageError without transformers; loading raises ParallelConfigError for an argument that cannot be
    lazy, and CheckpointError if there are no safetensors files.
    """
    sizes = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
    for what, size in sizes.items():
        whole_number(what, size, error=ParallelConfigError, minimum=1)
    if tensor_parallel_size == 1 and pipeline_parallel_size == 1:
        yield
        return
    _divert_loading()
    token = _lazy.set(True)
    try:
        yield
    finally:
        _lazy.reset(token)


@functools.cache
def _divert_loading() -> None:
    """Have transformers' ``from_pretrained`` ask, from now on, whether its caller is inside the context."""
    base = _transformers().PreTrainedModel
    own = base.__dict__["from_pretrained"].__func__

    @functools.wraps(own)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return (_load if _lazy.get() else own)(cls, *args, **kwargs)

    base.from_pretrained = classmethod(from_pretrained)


def _transformers() -> Any:
    try:
        import transformers  # optional: transformers
    except ImportError as error:
        raise MissingPackageError(f"this needs transformers ({error}): pip install 'nxd-infer[hf]'") from error
    return transformers


# --- one model -----------------------------------------------------------------------------------------------


def _load(cls: Any, path: Any, *args: Any, config: Any = None, **kwargs: Any) -> nn.Module:
    """``cls.from_pretrained(path, ...)`` without weights."""
    hf = _transformers()
    for name in _REFUSED:
        if kwargs.pop(name, None):
            raise ParallelConfigError(f"from_pretrained: {name} cannot be combined with lazy_load_for_parallelism()")
    place = kwargs.pop("device_map", None)
    if place is not None:
        raise ParallelConfigError(
            f"from_pretrained: device_map={place!r}: each rank puts its part where parallelize(device=...) says"
        )
    hub = {name: kwargs[name] for name in _HUB if name in kwargs}
    dtype = kwargs.pop("torch_dtype", None)
    dtype = kwargs.pop("dtype", dtype)
    attention = kwargs.pop("attn_implementation", None)
    for name in (*_IGNORED, *_HUB, "_from_auto", "_commit_hash", "adapter_kwargs", "trust_remote_code"):
        kwargs.pop(name, None)
    if not isinstance(config, hf.PretrainedConfig):
        config, kwargs = cls.config_class.from_pretrained(path, return_unused_kwargs=True, **hub, **kwargs)
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        raise ParallelConfigError(
            f"from_pretrained: {path} has quantized weights ({_kind_of(quantized)}), which lazy_load_for_parallelism() "
            "cannot read: load a checkpoint with plain weights"
        )
    folder = _folder_of(path, kwargs.pop("subfolder", ""), hub)
    stored = StoredWeights(folder, cls.base_model_prefix)
    dtype = _dtype_of(dtype, config, folder)
    how = {} if attention is None else {"attn_implementation": attention}
    with parameters_on_meta():
        model = cls._from_config(config, dtype=dtype, **how, **kwargs)
    model.config.name_or_path = model.name_or_path = str(path)
    if hasattr(model, "generation_config"):
        with contextlib.suppress(OSError):  # the model has no such file
            model.generation_config = hf.GenerationConfig.from_pretrained(path, **hub)
    setattr(model, WEIGHTS, stored)
    return model.eval()


def _kind_of(quantized: Any) -> str:
    method = quantized.get("quant_method") if isinstance(quantized, dict) else getattr(quantized, "quant_method", None)
    return f"quant_method = {getattr(method, 'value', method)!r}"


def _folder_of(path: Any, subfolder: str, hub: dict[str, Any]) -> Path:
    """Return the folder of a model's files; those of a hub's model are fetched."""
    if not Path(path).exists():
        from huggingface_hub import snapshot_download  # optional: transformers brings it

        patterns = ["*.json", "*.safetensors"]
        name = str(path)
        # The caller's `revision` is in `hub`; without one the hub's newest is asked for, as transformers does.
        path = snapshot_download(name, allow_patterns=patterns, **hub)  # nosec B615
    folder = Path(path) / subfolder if subfolder else Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory of a model")
    return folder


def _dtype_of(requested: Any, config: Any, folder: Path) -> torch.dtype:
    """Return the dtype of the parameters, as ``from_pretrained`` of the installed release chooses it."""
    if requested is None and int(_transformers().__version__.split(".")[0]) < 5:
        return torch.get_default_dtype()
    if requested in (None, "auto"):
        requested = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if requested is not None:
        return requested if isinstance(requested, torch.dtype) else getattr(torch, str(requested))
    source = weights(folder)
    return next((d for d in map(source.dtype, source.keys()) if d.is_floating_point), torch.get_default_dtype())
