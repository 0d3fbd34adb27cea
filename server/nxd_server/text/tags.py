"""Tags in a model's text: in many tokenizers each is a token of its own."""

from __future__ import annotations

import json
from collections.abc import Collection

from nxd_server.text.tokenizer import Tokenizer


def overlap(text: str, tag: str, most: int | None = None) -> int:
    """Return how many of the last ``most`` characters of ``text`` may begin ``tag``."""
    most = len(text) if most is None else most
    return next((size for size in range(min(len(tag) - 1, most), 0, -1) if text.endswith(tag[:size])), 0)


def with_tags_shown(tokenizer: Tokenizer, tags: Collection[str]) -> Tokenizer:
    """Return a tokenizer that decodes ``tags`` to text, which may be special tokens; this one if none is."""
    if not {tokenizer.id_to_token(token) for token in tokenizer.special_ids}.intersection(tags):
        return tokenizer
    changed = json.loads(tokenizer.raw.to_str())
    for token in changed["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in tags
    return Tokenizer(type(tokenizer.raw).from_str(json.dumps(changed)), tokenizer.config)
