"""Read the files that sentence-transformers wrote beside a model: pooling, the longest text, and the prompts.

``modules.json`` names the steps after the encoder and where their settings are, ``sentence_bert_config.json`` has the
longest text, ``config_sentence_transformers.json`` the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_models.hf.config_file import ConfigFile, Count, Flag, read_any_json, read_json

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""How the vectors of a text's tokens are combined into one."""
_OLD_NAMES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
"""``POOLINGS`` in the order in which their vectors are concatenated."""
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
"""Of dense layers after pooling, by torch's names."""
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_SETTINGS_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json")
_PROMPTS_FILE = "config_sentence_transformers.json"


def embeds(model_dir: Path) -> bool:
    """Return whether a directory is an embedding model that the library wrote; a cross-encoder is not.

    Raises ModelConfigError for another kind of model, and for a cross-encoder with steps after its head.
    """
    file, described = model_dir / "modules.json", model_dir / _PROMPTS_FILE
    if not file.is_file():
        return False
    kind = (read_json(described) if described.is_file() else {}).get("model_type") or "SentenceTransformer"
    if kind not in ("SentenceTransformer", "CrossEncoder"):
        raise ModelConfigError(
            f"{described}: model_type = {kind!r} is not supported; SentenceTransformer and CrossEncoder are"
        )
    if kind == "CrossEncoder" and (further := [name for name, _ in _modules(file) if name != "Transformer"]):
        raise ModelConfigError(f"{file}: a module of the type {further[0]!r} after a cross-encoder is not supported")
    return kind == "SentenceTransformer"


class _Settings(ConfigFile):
    max_seq_length: Count | None = None
    do_lower_case: Flag | None = None
    modality_config: dict[str, Any] | None = None


class _Dense(ConfigFile):
    in_features: Count
    out_features: Count
    bias: Flag = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None


def pooling_options(model_dir: Path) -> dict[str, Any]:
    """Return ``pooling``, ``normalize`` and ``dense``, if there are dense layers, from ``modules.json``; {} without it.

    Raises ModelConfigError naming an unsupported step, or order of steps: without it the vectors would differ.
    """
    file, described = model_dir / "modules.json", model_dir / _PROMPTS_FILE
    if not file.is_file():
        return {}
    if described.is_file() and (kept := read_json(described).get("truncate_dim")) is not None:
        raise ModelConfigError(
            f"{described}: truncate_dim = {kept!r} is not supported: remove it, and take the first {kept} values of a "
            "vector where they are used"
        )
    options: dict[str, Any] = {"normalize": False}
    dense: list[dict[str, Any]] = []
    steps = [step for step in _modules(file) if step[0] != "Dropout"]  # which acts in training only
    for kind, folder in steps:
        if kind == "Normalize":
            options["normalize"] = True
        elif kind == "Pooling":
            options["pooling"] = _pooling(model_dir, folder)
        elif kind == "Dense":
            dense.append(_dense(model_dir, folder))
        elif kind != "Transformer" or folder:
            raise ModelConfigError(
                f"{file}: a module of the type {kind!r} in the folder {folder!r} is not supported; supported are "
                f"{', '.join(_ORDER)}, the first of them in the directory itself"
            )
    order = [_ORDER.index(kind) for kind, _ in steps]
    if order != sorted(order):
        kinds = ", ".join(kind for kind, _ in steps)
        raise ModelConfigError(f"{file}: the modules {kinds} are not supported in this order, but {', '.join(_ORDER)}")
    return {**options, **({"dense": dense} if dense else {})}


def _dense(model_dir: Path, folder: str) -> dict[str, Any]:
    file = model_dir / folder / "config.json"
    found = _Dense.read(read_json(file), str(file))
    found.refuse("use_residual", "a residual connection around the layer is not supported")
    if {found.module_input_name, found.module_output_name or "sentence_embedding"} != {"sentence_embedding"}:
        raise found.error("module_input_name", "only layers after pooling are supported")
    name = found.activation_function.rpartition(".")[2]
    if not found.activation_function.startswith("torch.") or name not in ACTIVATIONS:
        raise found.error("activation_function", f"not supported; known are torch's {', '.join(ACTIVATIONS)}")
    sizes = {"inputs": found.in_features, "outputs": found.out_features, "bias": found.bias}
    return {"folder": folder, "activation": name, **sizes}


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return (kind, folder) of every step; the kind of a step from outside the library is its full type name."""
    entries = read_any_json(file)
    if not isinstance(entries, list) or not all(
        isinstance(m, dict) and isinstance(m.get("path", ""), str) for m in entries
    ):
        raise ModelConfigError(f"{file}: expected a list of objects with a type and a path")
    found = []
    for entry in entries:
        kind = str(entry.get("type", ""))
        own = kind.startswith("sentence_transformers.")
        found.append((kind.rpartition(".")[2] if own else kind, entry.get("path", "")))
    return found


def _pooling(model_dir: Path, folder: str) -> str:
    file = model_dir / folder / "config.json"
    fields = read_json(file)
    modes = fields.get("pooling_mode")
    if modes is None:
        named = zip(_OLD_NAMES, POOLINGS, strict=True)
        modes = [mode for name, mode in named if fields.get(f"pooling_mode_{name}")] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or any(mode not in POOLINGS for mode in modes):
        raise ModelConfigError(f"{file}: pooling_mode = {modes!r}: known are {', '.join(POOLINGS)}")
    if fields.get("include_prompt") is False and any(prompts(model_dir)["prompts"].values()):
        raise ModelConfigError(f"{file}: include_prompt = False: pooling without the prompt's tokens is not supported")
    return "+".join(modes)


def longest_text(model_dir: Path) -> int | None:
    """Return the tokens of the longest text, special ones included, from the directory's files; None if unspecified."""
    settings = _settings(model_dir)
    if settings is None:
        return None
    if settings.max_seq_length is not None:
        return settings.max_seq_length
    tokenizer = model_dir / "tokenizer_config.json"  # newer versions store it here
    if not tokenizer.is_file():
        return None
    found = read_json(tokenizer).get("model_max_length")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def lowercases(model_dir: Path) -> bool:
    """Return whether texts are lowercased before the tokenizer reads them."""
    settings = _settings(model_dir)
    return settings is not None and settings.do_lower_case is True


def _settings(model_dir: Path) -> _Settings | None:
    file = next((model_dir / name for name in _SETTINGS_FILES if (model_dir / name).is_file()), None)
    if file is None:
        return None
    found = _Settings.read(read_json(file), str(file))
    for name in ("processing_kwargs", "query_length", "document_length", "query_expansion"):
        found.refuse(name, "not supported: texts would be read in another way")
    if "message" in (found.modality_config or {}):
        raise found.error(
            "modality_config",
            "sentence-transformers puts each text into the chat template, which is not supported: remove the entry "
            "message if texts are to be embedded as they are, and compare",
        )
    return found


def prompts(model_dir: Path) -> dict[str, Any]:
    """Return ``prompts``, the texts by name that requests may prepend to theirs, and ``default_prompt``, the name of
    the prompt that is prepended if a request names none, or None."""
    file = model_dir / _PROMPTS_FILE
    fields = read_json(file) if file.is_file() else {}
    given = fields.get("prompts") or {}
    if not isinstance(given, dict) or not all(isinstance(text, (str, type(None))) for text in given.values()):
        raise ModelConfigError(f"{file}: prompts = {fields.get('prompts')!r}: expected an object from name to text")
    found = {"query": "", "document": ""} | {name: text or "" for name, text in given.items()}
    default = fields.get("default_prompt_name")
    if default is not None and default not in list(found):
        raise ModelConfigError(f"{file}: default_prompt_name = {default!r} is not one of {', '.join(found)}")
    return {"prompts": found, "default_prompt": default}


def activation_fields(model_dir: Path) -> dict[str, Any]:
    """Return the activation of a classifier as version 5 wrote it into ``config.json``; version 6 has it here."""
    file = model_dir / _PROMPTS_FILE
    named = read_json(file).get("activation_fn") if file.is_file() else None
    return {"sentence_transformers": {"activation_fn": named}} if named else {}


def matryoshka(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``matryoshka``: the sizes to which ``config.json`` says that vectors may be cut, True for any; {} without
    such a field."""
    sizes = raw.get("matryoshka_dimensions")
    if sizes is None:
        return {"matryoshka": True} if raw.get("is_matryoshka") else {}
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ModelConfigError(f"config.json: matryoshka_dimensions = {sizes!r}: expected a list of whole numbers")
    return {"matryoshka": sizes}


def files(model_dir: Path) -> list[str]:
    """Return the names of the library's files that this module reads from the directory."""
    names = [*_SETTINGS_FILES, _PROMPTS_FILE]
    if (modules := model_dir / "modules.json").is_file():
        names.append("modules.json")
        names += [f"{folder}/config.json" for _, folder in _modules(modules) if folder]
    return [name for name in names if (model_dir / name).is_file()]
