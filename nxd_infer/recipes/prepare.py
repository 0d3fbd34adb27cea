"""What a job's ranks need before they start: the model's directory with its tokenizer, and the data as tokens.

One process writes it under a name that follows from the recipe and the data's files; the others wait for it. Another
start of the same job finds it there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from nxd_infer.errors import RecipeError
from nxd_infer.hugging_face.gguf_file import model_directory
from nxd_infer.hugging_face.tokenizer import TOKENIZER
from nxd_infer.recipes.data import rows
from nxd_infer.recipes.data.encode import Encoder, Example
from nxd_infer.recipes.data.megatron import IndexedFile, blend_of, split_of
from nxd_infer.recipes.data.sources import Record, files_of, records
from nxd_infer.recipes.data.store import TokenStore, write_store
from nxd_infer.recipes.models import CONFIG, config_path, raw_config
from nxd_infer.recipes.recipe import Loaded
from nxd_infer.recipes.tokenizers import TRAINED, copy_tokenizer, tokenizer_files, train_tokenizer
from nxd_infer.util.version import VERSION
from nxd_server.text.chat_template import ChatTemplate
from nxd_server.text.tokenizer import Tokenizer

MODEL, TRAIN, VALIDATION = "model", "train", "validation"
WAIT_SECONDS = 3600.0
"""How long ranks wait for the one that prepares."""


@dataclass(frozen=True)
class Prepared:
    """``model``: a model directory without weights. ``train`` and ``validation``: their rows."""

    model: Path
    train: Dataset
    validation: Dataset | None
    notes: list[str] = field(default_factory=list)
    """What the lengths of rows have cut off."""


def prepare(loaded: Loaded, root: Path) -> Prepared:
    """Return what a job needs, which is written into ``root`` unless it is there. Raises RecipeError."""
    folder = root / _digest(loaded)
    if not folder.is_dir():
        from filelock import FileLock  # slow to import

        root.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(root / f"{folder.name}.lock", timeout=WAIT_SECONDS):
                if not folder.is_dir():
                    with tempfile.TemporaryDirectory(dir=root, prefix=".") as building:
                        _fill(loaded, Path(building) / folder.name)
                        (Path(building) / folder.name).rename(folder)
        except TimeoutError:
            problem = f"another process has prepared {folder} for more than {WAIT_SECONDS:.0f} s"
            raise RecipeError(f"{problem}: end it, and start again") from None
    return _open(loaded, folder)


# --- writing ------------------------------------------------------------------------------------------------


def _digest(loaded: Loaded) -> str:
    """Return a name for what follows from the recipe's model and data, the files that they name, and this version."""
    recipe = loaded.recipe
    data = dataclasses.asdict(recipe.data)
    facts: dict[str, Any] = {"data": {key: value for key, value in data.items() if "batch_size" not in key}}
    facts["model"] = {key: value for key, value in dataclasses.asdict(recipe.model).items() if key != "optim"}
    facts["alignment"] = dataclasses.asdict(recipe.model_alignment_strategy) | {"peft": None}
    facts["length"], facts["version"] = recipe.seq_length, VERSION
    sources = [loaded.path(text) for text in (recipe.data.train_dir, recipe.data.val_dir) if text]
    named = [file for source in sources for file in files_of(source)]
    named += [config for config in [config_path(loaded)] if config is not None]
    tokenizer = tokenizer_source(loaded)
    if tokenizer is not None:
        named += tokenizer_files(tokenizer)
    inner = [one for file in named for one in (sorted(file.rglob("*")) if file.is_dir() else [file])]
    stats = [(file, file.stat()) for file in inner if file.is_file()]
    facts["files"] = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tokenizer_source(loaded: Loaded) -> Path | None:
    """Return the directory or file of the tokenizer; None if it is trained, or if there is none."""
    keys = loaded.recipe.data.tokenizer
    given = keys.model or keys.type or keys.vocab_file
    if given is not None:
        return None if given == TRAINED else model_directory(loaded.path(given))
    config = config_path(loaded)
    if config is not None and tokenizer_files(config.parent):
        return config.parent
    return None


def _fill(loaded: Loaded, building: Path, most: int | None = None) -> list[str]:
    """Write all of it, of the first ``most`` records; return notes of what was cut off."""
    model = building / MODEL
    model.mkdir(parents=True)
    recipe = loaded.recipe
    source = tokenizer_source(loaded)
    if source is not None:
        copy_tokenizer(source, model, loaded.tree.where("data.tokenizer"))
    elif recipe.data.tokenizer.type == TRAINED:
        train_tokenizer(model, _texts(loaded), recipe.data.tokenizer.vocab_size)
    tokenizer = Tokenizer.from_dir(model) if (model / TOKENIZER).is_file() else None
    raw = raw_config(loaded, None if tokenizer is None else tokenizer.vocab_size)
    _check_sizes(loaded, raw, tokenizer)
    if tokenizer is not None:
        for name in ("bos_token_id", "eos_token_id"):
            if raw.get(name) is None and getattr(tokenizer, name) is not None:
                raw[name] = getattr(tokenizer, name)
    (model / CONFIG).write_text(json.dumps(raw, indent=1))
    encoder = encoder_of(loaded, model, tokenizer)
    notes = []
    for name, key in ((TRAIN, "train_dir"), (VALIDATION, "val_dir")):
        if getattr(recipe.data, key) is not None:
            some = itertools.islice(_records(loaded, key), most)
            facts = write_store(building / name, checked_examples(encoder, some, raw["vocab_size"]))
            notes += _cut_off(loaded, key, facts)
    return notes


def _records(loaded: Loaded, key: str) -> Iterator[Record]:
    """The records of ``train_dir`` or ``val_dir``."""
    data = loaded.recipe.data
    path = loaded.path(getattr(data, key))
    if key == "val_dir":
        return records(path, data.val_split, data.dataset_config, "validation")
    return itertools.islice(records(path, data.train_split, data.dataset_config), data.dev_choose_samples)


def _cut_off(loaded: Loaded, key: str, facts: dict[str, int]) -> list[str]:
    """Say what the lengths of rows have cut off. Raises RecipeError if they leave nothing to learn."""
    documents, silent, length = facts["documents"], facts["silent"], loaded.recipe.seq_length
    if documents and silent == documents and not loaded.recipe.is_pretraining:
        cut = f": all that counts lies behind data.seq_length = {length}" if facts["lost"] else ""
        raise loaded.tree.error(("data", key), f"has no token that counts in the loss{cut}")
    if not facts["cut"]:
        return []
    left = f"; in {silent:,} nothing is left to learn" if silent else ""
    lost = f"{facts['cut']:,} of {documents:,} documents are cut at {length} tokens (data.seq_length)"
    return [f"data.{key}: {lost}, which leaves out {facts['lost']:,} that count in the loss{left}"]


def notes_of_data(loaded: Loaded, most: int = 1000) -> list[str]:
    """Return what :func:`prepare` would say of the first records, without keeping anything. Raises as it would.

    Without records, and where a tokenizer would be made from them, there is nothing to say.
    """
    if loaded.recipe.data.train_dir is None or loaded.recipe.data.tokenizer.type == TRAINED:
        return []
    with tempfile.TemporaryDirectory() as folder:
        return [f"of the first {most:,} records, {note}" for note in _fill(loaded, Path(folder), most)]


def _texts(loaded: Loaded) -> Iterator[str]:
    """All texts of the training data, for a tokenizer that is made from them."""

    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for one in value.values():
                yield from inside(one)
        elif isinstance(value, list):
            for one in value:
                yield from inside(one)

    data = loaded.recipe.data
    if data.train_dir is None:
        problem = f"= {TRAINED!r} needs texts, and data_prefix has tokens; name one"
        raise loaded.tree.error("data.tokenizer.type", problem)
    for record in _records(loaded, "train_dir"):
        yield from inside({name: value for name, value in record.items() if name not in data.ignore_columns})


def _check_sizes(loaded: Loaded, raw: dict[str, Any], tokenizer: Tokenizer | None) -> None:
    if tokenizer is not None and tokenizer.vocab_size > raw["vocab_size"]:
        size = tokenizer.vocab_size
        problem = f"= {raw['vocab_size']} is less than the tokenizer's {size}; the nearest is {size}"
        raise loaded.tree.error("model.vocab_size", problem)
    length, longest = loaded.recipe.seq_length, raw.get("max_position_embeddings")
    if longest is not None and length > longest:
        problem = f"= {length} is above the model's {longest}; the nearest is {longest}"
        raise loaded.tree.error("data.seq_length", problem)


def encoder_of(loaded: Loaded, model: Path, tokenizer: Tokenizer | None) -> Encoder:
    """Return what makes tokens of a recipe's records."""
    recipe, pairs = loaded.recipe, loaded.recipe.model_alignment_strategy.pairs
    return Encoder(
        tokenizer,
        ChatTemplate.from_dir(model) if tokenizer is not None else None,
        mask_prompt=recipe.data.mask_prompt or pairs is not None,
        length=None if loaded.recipe.is_pretraining else recipe.seq_length,
        prompt_length=None if pairs is None else pairs.max_prompt_length,
        keep_end=pairs is not None and pairs.truncation_mode == "keep_end",
        pairs=pairs is not None,
        ignore=recipe.data.ignore_columns,
    )


def checked_examples(encoder: Encoder, found: Iterator[Record], vocabulary: int) -> Iterator[Example]:
    """Yield the records' examples. Raises RecipeError for other forms of records, and for tokens that there are not."""
    for number, record in enumerate(found):
        for example in encoder.examples(record, number):
            if len(example.ids):
                rows.check_vocabulary(min(example.ids), max(example.ids), vocabulary, f"record {number}")
            yield example


# --- reading ------------------------------------------------------------------------------------------------


def _open(loaded: Loaded, folder: Path) -> Prepared:
    recipe = loaded.recipe
    config = json.loads((folder / MODEL / CONFIG).read_text())
    if recipe.data.data_prefix:
        train, validation = (_indexed(loaded, config, part) for part in (0, 1))
        if train is None:
            raise loaded.tree.error("data.data_prefix", "has no row to train on")
        count = min(len(train), recipe.data.dev_choose_samples or len(train))  # pyright: ignore[reportArgumentType]
        return Prepared(folder / MODEL, Subset(train, range(count)), validation)
    stores = {"train_dir": TokenStore(folder / TRAIN)}
    if recipe.data.val_dir:
        stores["val_dir"] = TokenStore(folder / VALIDATION)
    train, *validation = (_rows(loaded, config, store) for store in stores.values())
    notes = [note for key, store in stores.items() for note in _cut_off(loaded, key, store.facts)]
    return Prepared(folder / MODEL, train, next(iter(validation), None), notes)


def _rows(loaded: Loaded, config: dict[str, Any], store: TokenStore) -> Dataset:
    recipe, length, pad = loaded.recipe, loaded.recipe.seq_length, config.get("pad_token_id") or 0
    if recipe.model_alignment_strategy.pairs is not None:
        return rows.Pairs(store, length, pad)
    if loaded.recipe.is_pretraining:
        return _windows(loaded, config, store, 0, len(store))
    bins = rows.pack(store.lengths, length) if recipe.packing else rows.one_each(store)
    return rows.Packed(store, length, bins, pad)


def _windows(loaded: Loaded, config: dict[str, Any], documents: rows.Documents, first: int, last: int) -> rows.Windows:
    data = loaded.recipe.data
    end = config.get("eos_token_id") if data.eod_mask_loss else None
    return rows.Windows(
        documents,
        loaded.recipe.seq_length,
        first,
        last,
        apart=data.reset_attention_mask,
        restart=data.reset_position_ids,
        end=end[0] if isinstance(end, list) else end,
        vocabulary=config["vocab_size"],
    )


def _indexed(loaded: Loaded, config: dict[str, Any], part: int) -> Dataset | None:
    """Rows of Megatron's files: of the share for training (0) or validation (1); None if that is empty."""
    data, origin = loaded.recipe.data, loaded.tree.where("data.data_prefix")
    parts, weights = [], []
    for weight, prefix in blend_of(data.data_prefix, origin):
        documents = IndexedFile(loaded.path(f"{prefix}.idx").with_suffix(""))
        where = loaded.tree.where("data.splits_string")
        windows = _windows(loaded, config, documents, *split_of(data.splits_string, part, len(documents), where))
        if len(windows):
            parts.append(windows)
            weights.append(weight)
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else rows.Blend(parts, weights)
