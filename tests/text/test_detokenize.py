"""Streaming decoders: the same text as decoding at once, whole characters only, stop strings cut out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.text_tokenizers import KINDS, byte_level, sentencepiece_style

texts = st.text(
    alphabet=st.one_of(
        st.characters(codec="utf-8", exclude_categories=("Cs",)), st.sampled_from("aé你好世界😀👩\u200d stop END.' \n")
    ),
    max_size=60,
)
quick = settings(max_examples=120)


def stream(tokenizer, ids, stop=()):
    decoder = tokenizer.stream(stop)
    pieces = []
    for token in ids:
        pieces.append(decoder.push(token))
        if decoder.matched is not None:
            break
    pieces.append(decoder.flush())
    return pieces, decoder.matched


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
@quick
def test_streamed_text_equals_text_decoded_at_once(kind, text):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_style"])
@given(text=texts)
@quick
def test_text_survives_the_round_trip_and_no_piece_is_a_broken_character(kind, text):
    tokenizer = KINDS[kind]()
    text = text.replace("▁", "_").replace("\ufffd", "?")
    pieces, _ = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 329), max_size=40))
@quick
def test_any_bytes_at_all_stream_to_what_decoding_at_once_gives(ids):
    tokenizer = byte_level()
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(3, 258), min_size=1, max_size=200))
@settings(max_examples=40)
def test_endless_invalid_bytes_are_not_held_back_for_ever(ids):
    tokenizer = sentencepiece_style()
    decoder = tokenizer.detokenizer()
    silent = 0
    for token in ids:
        silent = 0 if decoder.push(token) else silent + 1
        assert silent < 8


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
@given(
    text=texts, stops=st.lists(st.text(alphabet="aeé世界😀 stopEND.'", min_size=1, max_size=6), min_size=1, max_size=3)
)
@quick
def test_the_first_stop_string_to_be_complete_ends_the_text_before_it(kind, text, stops):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    full = tokenizer.decode(ids)
    pieces, matched = stream(tokenizer, ids, stops)
    found = [(full.find(stop) + len(stop), full.find(stop), stop) for stop in stops if stop in full]
    if found:
        _, place, first = min(found)
        assert matched == first
        assert "".join(pieces) == full[:place]
    else:
        assert matched is None
        assert "".join(pieces) == full


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_cannot():
    tokenizer = byte_level()
    decoder = tokenizer.stream(["STOP!"])
    shown = ""
    for token in tokenizer.encode("go STOP", add_special_tokens=False):
        shown += decoder.push(token)
        assert "S" not in shown
    for token in tokenizer.encode(" it", add_special_tokens=False):
        shown += decoder.push(token)
    assert shown == "go STOP it"


def test_stop_strings_wait_for_the_minimum_length():
    tokenizer = byte_level()
    decoder = tokenizer.stream(["a"])
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    assert decoder.push(token, may_stop=False) == "a"
    assert decoder.push(token) == "" and decoder.matched == "a"


def test_special_tokens_are_skipped_and_added_ones_keep_their_spaces():
    tokenizer = byte_level()
    ids = tokenizer.encode("<|im start|>hello</s>")
    assert ids[0] == 0 and 2 in ids and ids[-1] == 1
    assert "".join(stream(tokenizer, ids)[0]) == "hello"
    shown = tokenizer.detokenizer(skip_special_tokens=False)
    assert "".join(shown.push(token) for token in ids) == "<s><|im start|>hello</s>"


def test_the_space_before_a_continuation_is_kept_and_before_a_new_text_is_not():
    tokenizer = sentencepiece_style()
    prompt, word = tokenizer.encode("the quick", add_special_tokens=False), tokenizer.encode("fox")
    continued = tokenizer.detokenizer(prompt)
    assert "".join(continued.push(token) for token in word) == " fox"
    fresh = tokenizer.detokenizer([*prompt, tokenizer.token_to_id("</s>")])
    assert "".join(fresh.push(token) for token in word) == "fox"
