"""Tokenizers of every class that transformers has, small enough to build in a moment, and texts to compare them on."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPECIAL = (
    *("<s>", "<pad>", "</s>", "<unk>", "<mask>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>"),
    *("<|startoftext|>", "<bos>", "<eos>", "<cls>", "<sep>", "<eod>", "<|im_end|>"),
)
SENTENCE = (
    "the quick brown fox jumps over a lazy dog and don't stop 12 345 def return naïve café Ünï 你好 世界 Ωμέγα привет"
)
WORDS = SENTENCE.split()
CORPUS = [" ".join(WORDS[n:] + WORDS[:n]) for n in range(len(WORDS))]
PIECES = (
    *WORDS,
    *SPECIAL,
    *(
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\r\n",
        "\n\n",
        "\u00a0",
        "\u2003",
        "\u3000",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\u2028",
    ),
    *(
        "\x00",
        "\x01",
        "\x0b",
        "\x1f",
        "\x7f",
        "\u0085",
        "\ufffd",
        "\u0301",
        "\ufb01",
        "\uff21",
        "\u2460",
        "\u00df",
        "İ",
        "ǅ",
    ),
    *(
        "▁",
        "##",
        "Ġ",
        "Ċ",
        "<0x0A>",
        "@@",
        "</w>",
        "_",
        "-",
        ".",
        "...",
        "!",
        "?!",
        ",",
        "'s",
        "'LL",
        '"',
        "{",
        "}",
        "\\",
        "/",
    ),
    *(
        "😀",
        "👩‍👩‍👧",
        "🇨🇭",
        "안녕",
        "שלום",
        "नमस्ते",
        "ภาษา",
        "1,234.5",
        "0x1F",
        "https://a.b/c?d=e",
        "<b>&amp;</b>",
        "<",
        "|",
        "$x^2$",
    ),
)


def texts(count: int = 400) -> list[str]:
    """Pieces of all kinds one after the other, with and without spaces between them; each alone first."""
    draw = random.Random(0)
    found = ["", *PIECES]
    while len(found) < count:
        found.append(draw.choice(["", " ", ""]).join(draw.choices(PIECES, k=draw.randint(2, 9))))
    return found[:count]


@functools.cache
def _byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(raw.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@functools.cache
def _metaspace() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """As sentencepiece's BPE: U+2581 for spaces, and tokens of single bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<unk>", *(token for token in SPECIAL if token != "<unk>"), *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    raw.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(raw.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@functools.cache
def _unigram() -> list[tuple[str, float]]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(CORPUS * 3, trainer)
    return [(piece, score) for piece, score in json.loads(raw.to_str())["model"]["vocab"]]


@functools.cache
def _wordpiece() -> dict[str, int]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    raw = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    raw.normalizer = normalizers.BertNormalizer()  # pyright: ignore[reportAttributeAccessIssue]
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(SPECIAL), show_progress=False)
    raw.train_from_iterator(CORPUS * 3, trainer)
    return raw.get_vocab()


@functools.cache
def sentencepiece_model(kind: str) -> bytes:
    """A file of the sentencepiece library, of the kind ``bpe`` or ``unigram``."""
    import io

    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=written,
        vocab_size=420 if kind == "bpe" else 340,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        user_defined_symbols=["<mask>", "<|im_end|>"],
        minloglevel=2,
    )
    return written.getvalue()


def write_files(cls: Any, folder: Path) -> dict[str, str]:
    """Write the vocabulary files that a class names; return their paths by the names of its arguments."""
    written: dict[str, str] = {}
    for argument, name in cls.vocab_files_names.items():
        path = folder / name
        if argument == "merges_file":
            path.write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in _byte_level()[1]), encoding="utf-8")
        elif argument.endswith("vocab_file") and name.endswith(".json"):
            path.write_text(json.dumps(_byte_level()[0]), encoding="utf-8")
        elif argument == "vocab_file" and name.endswith(".model"):
            path.write_bytes(sentencepiece_model("bpe" if getattr(cls.model, "__name__", "") == "BPE" else "unigram"))
        elif argument == "vocab_file":
            words = sorted(_wordpiece(), key=_wordpiece().__getitem__)
            path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        else:
            continue
        written[argument] = str(path)
    return written


def built(cls: Any) -> Iterator[Any]:
    """Yield tokenizers of a class with vocabularies of the kinds that it takes, or why there is none."""
    kind = getattr(getattr(cls, "model", None), "__name__", None)
    byte_level, metaspace = _byte_level(), _metaspace()
    vocabularies = {
        "BPE": ({"vocab": byte_level[0], "merges": byte_level[1]}, {"vocab": metaspace[0], "merges": metaspace[1]}),
        "Unigram": ({"vocab": _unigram()},),
        "WordPiece": ({"vocab": _wordpiece()},),
    }
    for given in vocabularies.get(str(kind), [one for several in vocabularies.values() for one in several]):
        try:
            yield cls(**given)
        except Exception as error:
            yield error
