"""The demo's training text: the Python language reference, which ships with Python, and a tokenizer trained on it."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB_SIZE = 4096
HELD_OUT = ("import", "strings")
"""Held-out chapters, used only for evaluation: unlike most, they share no paragraph with another chapter."""
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
# A plain continuation model: a conversation is the text of its messages in order.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def documents() -> list[str]:
    """Return the chapters of the language reference (``pydoc_data.topics``), about 0.5 MB of English in total."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def split() -> tuple[list[str], list[str]]:
    """Return the chapters to train on and the held-out chapters."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics) if name not in HELD_OUT], [topics[name] for name in HELD_OUT]


def write_tokenizer(directory: Path, texts: list[str], vocab_size: int = VOCAB_SIZE):
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
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return tokenizer
