"""What a request forbids, as the sampler's mask; beside sets of token ids."""

from __future__ import annotations

import numpy as np
import pytest

from nxd_server.errors import RequestError
from nxd_server.http.error_responses import ApiError
from nxd_server.http.openai.schemas import CompletionBody
from nxd_server.text.token_rules import TokenRules
from tests.support.text.text_tokenizers import KINDS

VOCAB = 1000


def may_follow(rules, output=()):
    words = np.zeros(-(-VOCAB // 32), np.int32)
    rules.apply(words, list(output), ())
    return {token for token in range(VOCAB) if words.view(np.uint32)[token // 32] >> token % 32 & 1}


def test_only_allowed_ones_may_follow():
    allowed = [999, 0, 31, 32, 0, 77]
    assert may_follow(TokenRules(allowed, [], None, VOCAB)) == set(allowed)
    with pytest.raises(RequestError, match=r"^allowed_token_ids: token 1000 is outside the vocabulary of 1000"):
        TokenRules([5, VOCAB], [], None, VOCAB)
    with pytest.raises(ApiError, match="allowed_token_ids"):
        CompletionBody.parse({"prompt": "a", "allowed_token_ids": [1] * 65_537})


@pytest.mark.parametrize("kind", KINDS)
def test_blank_words_are_forbidden_like_any_other(kind):
    tokenizer = KINDS[kind]()
    for word in ("\n", " ", "fox"):
        if tokens := tokenizer.encode(word, add_special_tokens=False):
            *before, last = tokens
            assert last not in may_follow(TokenRules([], [word], tokenizer, VOCAB), before)
            assert not before or last in may_follow(TokenRules([], [word], tokenizer, VOCAB))
        else:
            with pytest.raises(RequestError, match=r"^bad_words: the tokenizer makes no token of"):
                TokenRules([], [word], tokenizer, VOCAB)
