"""The tokenizer of a recipe: copied from a directory, or trained from the data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from nxd_infer.errors import ModelConfigError, RecipeError
from nxd_infer.hugging_face.tokenizer import TEMPLATE, has_tokenizer, source_files, write_canonical

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
# A plain continuation model: a conversation is the text of its messages in order.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
TRAINED = "trained"
"""``data.tokenizer.type`` of a tokenizer that is made from the data."""
GENERATION = "generation_config.json"
"""The file beside a tokenizer's whose ids are tokens of it."""


def train_tokenizer(directory: Path, texts: Iterable[str], vocab_size: int, template: str = CHAT_TEMPLATE):
    """Train a byte-level BPE of ``vocab_size`` tokens and write it in Hugging Face's format; return the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[UNKNOWN, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": BEGIN,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (directory / TEMPLATE).write_text(template)
    return tokenizer


def copy_tokenizer(source: Path, directory: Path, where: str) -> None:
    """Write a directory's tokenizer and templates, as transformers reads them, and its generation_config.json.

    Raises RecipeError that begins with ``where``.
    """
    require_tokenizer(source, where)
    folder = source if source.is_dir() else source.parent
    try:
        write_canonical(folder, directory)
    except ModelConfigError as error:
        raise RecipeError(f"{where}: data.tokenizer: {error}") from None
    if (folder / GENERATION).is_file():
        shutil.copyfile(folder / GENERATION, directory / GENERATION)


def tokenizer_files(source: Path) -> list[Path]:
    """Return the files that :func:`copy_tokenizer` reads."""
    folder = source if source.is_dir() else source.parent
    return [*source_files(folder), *folder.glob(GENERATION)] if has_tokenizer(folder) else []


def require_tokenizer(source: Path, where: str) -> None:
    """Raise RecipeError that begins with ``where`` if there is no tokenizer."""
    if not source.exists() or not tokenizer_files(source):
        raise RecipeError(
            f"{where}: data.tokenizer = {str(source)!r} has no tokenizer: give the directory of a model, or "
            f'"{TRAINED}" to make one from the data'
        )
