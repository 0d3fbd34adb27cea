"""A GGUF file as a model directory: transformers reads it once, and what it read is kept in the cache.

After that it is a Hugging Face directory like any other: configuration, tokenizer, chat template, safetensors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nxd_infer.errors import CheckpointError, MissingPackageError, ModelConfigError
from nxd_infer.util.cache_dir import cache_dir

SUFFIX = ".gguf"
PACKAGES = ("transformers", "gguf", "accelerate")
"""What reads the file; accelerate because transformers asks for it."""
WAIT_SECONDS = 3600.0
"""How long to wait for another process that reads the same file."""
_FORMAT = 1
"""Counts up if what is written changes."""
_UNQUANTISED = {"F32": "float32", "F16": "float16"}
_END_OF_TURN = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Tokens that end an answer besides the end of the text, as in llama.cpp; transformers leaves them out."""

_LLAMA_3 = (1.0, 4.0, 8192)
"""Of the releases of Llama 3: low and high frequency factor, and the context of the pre-training."""


def find_gguf(path: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that ``path`` is, or that a directory without safetensors holds; None if there is none.

    Raises ModelConfigError if a directory holds several.
    """
    path = Path(path)
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise ModelConfigError(f"{path} holds {', '.join(file.name for file in found)}: give the path of one of them")
    return found[0] if found else None


def model_directory(path: str | os.PathLike[str]) -> Path:
    """Return ``path``, or for what :func:`find_gguf` finds there the directory of the same model.

    Weights are bfloat16, or as in the file if that holds plain float32 or float16. The directory is made once for a
    path, size and time of change; contents are not hashed, which would read tens of gigabytes at each start.

    Raises CheckpointError for a damaged file, ModelConfigError for one that transformers cannot read in full, and
    MissingPackageError without the extra ``hf``.
    """
    file = find_gguf(path)
    if file is None:
        return Path(path)
    from filelock import FileLock  # slow to import

    kept = cache_dir("gguf") / _digest(file)
    try:
        if not kept.is_dir():
            with FileLock(kept.with_suffix(".lock"), timeout=WAIT_SECONDS):
                if not kept.is_dir():
                    _write(file, kept)
    except TimeoutError:
        problem = f"another process has read {file} for more than {WAIT_SECONDS:.0f} s"
        raise CheckpointError(f"{problem}: end it, and start again") from None
    return kept / file.stem  # a server calls the model by this name


def _digest(file: Path) -> str:
    try:
        found = file.stat()
        facts = [file.resolve(), found.st_size, found.st_mtime_ns, _FORMAT, *map(version, PACKAGES)]
    except FileNotFoundError:
        raise ModelConfigError(f"{file} is missing: expected a GGUF file") from None
    except PackageNotFoundError as error:
        problem = f"{file}: reading GGUF needs the package {error.name}: pip install 'nxd-infer[hf]'"
        raise MissingPackageError(problem, name=error.name) from None
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]


def _write(file: Path, kept: Path) -> None:
    """Make the directory ``kept``, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=kept.parent, ignore_cleanup_errors=True) as building:
        made = Path(building) / "made"
        (made / file.stem).mkdir(parents=True)
        with _reading_once(file) as reader, contextlib.redirect_stderr(io.StringIO()):  # transformers draws bars there
            _convert(file, reader, made / file.stem)
        made.rename(kept)


@contextlib.contextmanager
def _reading_once(file: Path) -> Iterator[Any]:
    """Yield the reader of ``file``, which transformers gets whenever it opens the file: of the 26 s of processor time
    that it takes for 135 M parameters, 14 pass while it reads the file three times, and makes one table per module."""
    import gguf  # slow to import, and optional
    import numpy as np

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            """As in the class above, which makes several memmaps for each number, and reads past the end as nothing."""
            kind = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
            if int(offset) + kind.itemsize * int(count) > len(self.data):
                raise EOFError("it ends early")
            return np.frombuffer(self.data, kind, int(count), int(offset))

    kept = gguf.GGUFReader, gguf.get_tensor_name_map
    try:
        reader = Reader(file)
    except Exception as error:
        raise CheckpointError(f"{file} is damaged, or is not a GGUF file: {error or type(error).__name__}") from error
    gguf.GGUFReader = lambda path, *_: reader if Path(path) == file else kept[0](path)
    gguf.get_tensor_name_map = functools.cache(kept[1])
    try:
        yield reader
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = kept


def _convert(file: Path, reader: Any, out: Path) -> None:
    """Write the Hugging Face directory ``out``. Raises ModelConfigError for what transformers cannot read, or drops."""
    import torch
    import transformers as hf  # slow to import, and optional

    if (parts := _field(reader, "split.count") or 1) > 1:
        raise ModelConfigError(
            f"{file} is one of {parts} parts: join them (llama-gguf-split --merge), and give the whole file"
        )
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    dtype = getattr(torch, _UNQUANTISED.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16")
    architecture = _field(reader, "general.architecture")
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    unpacked: dict[str, Any] = {}
    if hasattr(hf, "GgufConfig"):  # releases without it unpack in any case
        unpacked["quantization_config"] = hf.GgufConfig(dequantize=True)
    try:
        config = hf.AutoConfig.from_pretrained(**where)  # nosec B615  # a file of this machine
        kind: Any = hf.AutoModelForSeq2SeqLM if config.is_encoder_decoder else hf.AutoModelForCausalLM
        scaling = _dropped_scaling(file, reader, config)
        model, info = kind.from_pretrained(**where, **unpacked, dtype=dtype, output_loading_info=True)
        if _field(reader, "tokenizer.ggml.model") is not None:
            hf.AutoTokenizer.from_pretrained(**where).save_pretrained(out)  # nosec B615
    except ModelConfigError:
        raise
    except Exception as error:
        raise ModelConfigError(
            f"{file}: transformers {hf.__version__} cannot read this GGUF file of the architecture {architecture!r}: "
            f"{error or type(error).__name__}"
        ) from error
    if missing := sorted(info["missing_keys"]):  # transformers makes up what is not there
        raise CheckpointError(f"{file} lacks {len(missing)} weights of the model, the first is {missing[0]}")
    known = config.eos_token_id
    ends = [*(known if isinstance(known, list) else [known]), *(_field(reader, name) for name in _END_OF_TURN)]
    if model.generation_config is not None:
        model.generation_config.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None))
    if getattr(model.config, "rope_parameters", None):  # transformers 5
        model.config.rope_parameters = {**model.config.rope_parameters, **scaling}
    elif scaling:
        model.config.rope_scaling = scaling
    model.save_pretrained(out)


def _field(reader: Any, name: str) -> Any:
    found = reader.get_field(name)
    return None if found is None else found.contents()


def _dropped_scaling(file: Path, reader: Any, config: Any) -> dict[str, Any]:
    """Return the scaling of the rotary positions that transformers does not read: that of Llama 3.1, 3.2 and 3.3, of
    which the file has the factors of the frequencies alone. Raises ModelConfigError for any other."""
    import torch  # a server asks what a path is without torch

    from nxd_infer.hugging_face.rope_scaling import RopeConfig, inverse_frequencies

    kept = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if kept.get("rope_type", "default") != "default":
        return {}
    named = _field(reader, f"{_field(reader, 'general.architecture')}.rope.scaling.type")
    tensors = {
        tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))
    }
    if named in (None, "none") and list(tensors) == ["rope_freqs.weight"]:
        factors = torch.tensor(tensors["rope_freqs.weight"])
        theta = kept.get("rope_theta") or config.rope_theta
        plain, llama3 = RopeConfig(theta=theta), RopeConfig("llama3", theta, float(factors.max()), *_LLAMA_3)
        plain_inv_freq, scaled = (inverse_frequencies(2 * len(factors), rope) for rope in (plain, llama3))
        if torch.allclose(plain_inv_freq / factors, scaled, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": llama3.factor,
                "low_freq_factor": llama3.low_freq_factor,
                "high_freq_factor": llama3.high_freq_factor,
                "original_max_position_embeddings": llama3.original_max_position,
            }
    if dropped := [f"rope.scaling.type = {named}"] * (named not in (None, "none")) + list(tensors):
        raise ModelConfigError(
            f"{file} has {dropped[0]}, and transformers reads its rotary positions without that scaling: use the "
            "model's Hugging Face directory"
        )
    return {}
