"""Tokens that a request forbids, whatever the text is: all but some (``allowed_token_ids``), and ``bad_words``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nxd_server.errors import RequestError
from nxd_server.text.grammars import ban
from nxd_server.text.tokenizer import Tokenizer


class TokenRules:
    """The rules of one request; its choices share them."""

    def __init__(self, allowed: Sequence[int], words: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int):
        """``allowed``: token ids, or none for all. ``words``: texts that an answer does not have, as the tokens that
        the tokenizer makes of them at the beginning of a text and behind a space. Raises RequestError."""
        if (largest := max(allowed, default=0)) >= vocab_size:
            raise RequestError("allowed_token_ids", f"token {largest} is outside the vocabulary of {vocab_size}")
        may = np.full(-(-vocab_size // 32) * 32, not allowed)
        may[np.asarray(allowed, np.int64)] = True
        self._mask = np.packbits(may, bitorder="little").view(np.uint32)
        bad: list[list[int]] = []
        if words and tokenizer is None:
            raise RequestError("bad_words", "needs a tokenizer, and this artifact has none; use logit_bias")
        for word in words:
            assert tokenizer is not None
            texts = (word, word) if word.isspace() else (word.lstrip(), " " + word.lstrip())
            plain, spaced = (tokenizer.encode(one, add_special_tokens=False, field="bad_words") for one in texts)
            if not plain:
                raise RequestError("bad_words", f"the tokenizer makes no token of {word!r}")
            # As in vLLM: a space that is a token of its own adds nothing.
            bad += [plain] if plain[:1] == spaced[:1] or len(plain) != len(spaced) else [plain, spaced]
        ban(self._mask, [last for *before, last in bad if not before and last < vocab_size])
        self._bad = [(before, last) for *before, last in bad if before and last < vocab_size]

    def apply(self, words: np.ndarray, output: list[int], banned: Sequence[int] | None) -> None:
        """Clear what may not follow ``output`` in ``words``, a row of the sampler's mask.

        ``banned``: what else may not; None if a grammar has written the row. Raises RequestError if nothing may follow.
        """
        bits = words.view(np.uint32)
        if banned is not None:
            bits[:] = 0xFFFFFFFF
            ban(bits, banned)
        bits &= self._mask
        ban(bits, [last for before, last in self._bad if output[-len(before) :] == before])
        if not bits.any():
            raise RequestError("allowed_token_ids", "with bad_words, min_tokens and structured_outputs leave no token")
