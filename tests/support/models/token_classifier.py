"""A tiny token classifier of transformers with its tokenizer, random but sure of what it finds."""

from __future__ import annotations

from pathlib import Path

import torch

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
_WORDS = "[PAD] [UNK] [CLS] [SEP] ada ##lo ##ve ##lace lives in lon ##don and par ##is , . met bob ##by"
WORDS = _WORDS.split()
TEXTS = ["Adalovelace lives in London.", "bobby, Ada met PARIS and London", "zebra in 中 lon"]


def write_token_classifier(path: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    names = dict(enumerate(LABELS))
    config = transformers.BertConfig(
        **sizes, vocab_size=len(WORDS), max_position_embeddings=32, initializer_range=0.5, id2label=names
    )
    transformers.BertForTokenClassification(config).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(vocab=str(path / "vocab.txt")).save_pretrained(path)
    return path


def expected(path: Path, texts: list[str], strategy: str) -> list[list[dict]]:
    """What transformers' pipeline finds."""
    import transformers

    pipe = transformers.pipeline("token-classification", str(path), aggregation_strategy=strategy, device="cpu")
    return [pipe(text) for text in texts]
