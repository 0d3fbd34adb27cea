"""Small real tokenizers of each kind that models come with, built in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nxd_infer.hugging_face.tokenizer import write_canonical
from nxd_server.text.grammars import CompiledGrammar, Grammars
from nxd_server.text.structured_outputs import StructuredOutputs
from nxd_server.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again: that is what foxes do.",
    "Streaming must never break a character: 你好，世界 😀 👩‍👩‍👧 naïve café Ωμέγα",
    "def f(x):\n    return x + 1  # comments don't matter\n",
    "stop words and stop strings; END of text. Don't stop now! 1234567890",
]


@functools.cache
def byte_level() -> Tokenizer:
    """GPT-2 style: every byte has a token."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|im start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS * 3, trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(raw, {"bos_token": "<s>", "eos_token": "</s>"})


@functools.cache
def sentencepiece_style() -> Tokenizer:
    """Llama 2 style: U+2581 for spaces, byte fallback, the leading space of a text dropped."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, normalizers, trainers

    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Raw(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ascii_only = ["".join(char for char in line if ord(char) < 128) for line in CORPUS]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=["▁", "é"], show_progress=False
    )
    trained.train_from_iterator(ascii_only * 3, trainer)
    import json

    spec = json.loads(trained.to_str())
    # The byte tokens are ordinary pieces of the model; only the first three are special.
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < 3]
    raw = Raw.from_str(json.dumps(spec))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(raw, {"bos_token": "<s>", "eos_token": "</s>"})


@functools.cache
def wordpiece() -> Tokenizer:
    """BERT style: whole words and ``##`` continuations."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    raw = Raw(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=True)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    raw.train_from_iterator(CORPUS * 3, trainer)
    return Tokenizer(raw, {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})


def read_canonical(directory: Path, **options: Any) -> Tokenizer:
    """A directory's tokenizer as a server reads it, of the files that a recipe's job has; raises what they raise."""
    target = directory / "canonical"
    target.mkdir(exist_ok=True)
    write_canonical(directory, target, **options)
    return Tokenizer.from_dir(target)


def with_tokens(*names: str) -> Tokenizer:
    """:func:`byte_level` with more special tokens."""
    raw = type(byte_level().raw).from_str(byte_level().raw.to_str())
    raw.add_special_tokens(list(names))
    return Tokenizer(raw, byte_level().config)


def taken(tokenizer: Tokenizer, grammar: CompiledGrammar, text: str, banned: Sequence[int] = ()) -> str:
    """What the grammar takes of ``text`` and its end: all, or the text before what it does not."""
    guide, words = grammar.guide(), np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    end = tokenizer.eos_token_id
    assert end is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    for place, token in enumerate([*ids, end]):
        guide.allow(words, banned)
        assert words.any() or guide.complete
        if (guide.complete and token != end) or not words.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1:
            return tokenizer.decode(ids[:place], skip_special_tokens=False)
        guide.take(token)
    return "all"


def compiled(tokenizer: Tokenizer, **asked: Any) -> CompiledGrammar:
    """The grammar that structured outputs ask for."""
    assert tokenizer.eos_token_id is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    return grammars.compiled(StructuredOutputs(**asked))


KINDS = {"byte_level": byte_level, "sentencepiece_style": sentencepiece_style, "wordpiece": wordpiece}
