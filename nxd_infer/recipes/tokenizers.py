"""The tokenizer of a recipe: copied from a directory, or trained from the data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from nxd_infer.errors import RecipeError
from nxd_models.serving.tasks import SERVING_FILES

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
# A plain continuation model: a conversation is the text of its messages in order.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
TRAINED = "trained"
"""``data.tokenizer.type`` of a tokenizer that is made from the data."""
FILES = tuple(name for name in SERVING_FILES if name != "config.json")
"""A tokenizer's files, and the generation_config.json beside them: its ids are tokens of this tokenizer."""


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
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return tokenizer


def copy_tokenizer(source: Path, directory: Path, where: str) -> None:
    """Copy the tokenizer's files of a directory, or a tokenizer.json with what lies beside it."""
    for file in tokenizer_files(source, where):
        shutil.copyfile(file, directory / file.name)


def tokenizer_files(source: Path, where: str) -> list[Path]:
    """Return what :func:`copy_tokenizer` copies. Raises RecipeError that begins with ``where`` without any."""
    folder = source if source.is_dir() else source.parent
    found = [folder / name for name in FILES if (folder / name).is_file()]
    if not source.exists() or not found:
        raise RecipeError(
            f"{where}: data.tokenizer = {str(source)!r} has no tokenizer: give the directory of a model, or "
            f'"{TRAINED}" to make one from the data'
        )
    return found
