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
        self._mask = np.full(-(-vocab_size // 32), 0 if allowed else 0xFFFFFFFF, np.uint32)
        for token in allowed:
            self._mask[token // 32] |= np.uint32(1 << token % 32)
        self._bad: list[list[int]] = []
        if words and tokenizer is None:
            raise RequestError("bad_words", "needs a tokenizer, and this artifact has none; use logit_bias")
        for word in words:
            assert tokenizer is not None
            texts = word.lstrip(), " " + word.lstrip()
            plain, spaced = (tokenizer.encode(one, add_special_tokens=False, field="bad_words") for one in texts)
            # As in vLLM: a space that is a token of its own adds nothing.
            self._bad += [plain] if plain[:1] == spaced[:1] or len(plain) != len(spaced) else [plain, spaced]
        self._bad = [tokens for tokens in self._bad if tokens and tokens[-1] < vocab_size]

    def apply(self, words: np.ndarray, output: list[int], banned: Sequence[int] | None) -> None:
        """Clear what may not follow ``output`` in ``words``, a row of the sampler's mask.

        ``banned``: what else may not; None if a grammar has written the row. Raises RequestError if nothing may follow.
        """
        bits = words.view(np.uint32)
        if banned is not None:
            bits[:] = 0xFFFFFFFF
            ban(bits, banned)
        bits &= self._mask
        ban(bits, [last for *before, last in self._bad if not before or output[-len(before) :] == before])
        if not bits.any():
            raise RequestError("allowed_token_ids", "with bad_words, min_tokens and structured_outputs leave no token")
