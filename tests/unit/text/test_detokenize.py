"""Streaming decoders: the same text as decoding at once, whole characters only, stop strings cut out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_server.text.detokenize import Detokenizer, TextStream
from tests.support.text.text_tokenizers import KINDS, byte_level, sentencepiece_style

texts = st.text(
    alphabet=st.one_of(
        st.characters(codec="utf-8", exclude_categories=("Cs",)), st.sampled_from("aé你好世界😀👩\u200d stop END.' \n")
    ),
    max_size=60,
)
quick = settings(max_examples=40)


def stream(tokenizer, ids):
    decoder = Detokenizer(tokenizer)
    return [*map(decoder.push, ids), decoder.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
@quick
def test_streamed_text_is_what_decoding_at_once_gives_in_whole_characters(kind, text):
    tokenizer = KINDS[kind]()
    text = text.replace("▁", "_").replace("\ufffd", "?")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if kind != "wordpiece":  # which has no token for most characters
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(3, 258), max_size=100))
@quick
def test_any_bytes_at_all_stream_to_what_decoding_at_once_gives_and_are_not_held_for_ever(ids):
    tokenizer = byte_level()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    pieces = stream(sentencepiece_style(), ids)
    assert all(any(pieces[place : place + 8]) for place in range(len(pieces) - 8))


class Pieces:
    """A detokenizer whose tokens have given texts."""

    def __init__(self, pieces, tail=""):
        self._pieces, self._tail = iter(pieces), tail

    def push(self, token):
        return next(self._pieces)

    def flush(self):
        return self._tail


def plain_stops(pieces, tail, stops, least):
    """What :class:`TextStream` returns, piece by piece: by looking for every stop string in the whole text."""
    text, shown = "", []
    for number, piece in enumerate([*pieces, tail]):
        before, text = len(text), text + piece
        if number >= least:
            places = ((stop, at) for stop in stops for at in range(len(text)) if text.startswith(stop, at))
            ends = [(at + len(stop), at, stop) for stop, at in places if at + len(stop) > before]
            if ends:
                _, at, matched = min(ends)
                return [*shown, text[len("".join(shown)) : at]], matched
        begun = (stop[:size] for stop in stops for size in range(1, len(stop)))
        held = 0 if number == len(pieces) else max((len(one) for one in begun if text.endswith(one)), default=0)
        shown.append(text[len("".join(shown)) : len(text) - held])
    return shown, None


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=10),
    tail=st.text("ab", max_size=2),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4, unique=True),
    least=st.integers(0, 4),
)
@settings(max_examples=150)
def test_stop_strings_are_found_as_by_looking_through_the_text(pieces, tail, stops, least):
    decoder, shown = TextStream(Pieces(pieces, tail), stops), []
    for number in range(len(pieces)):
        shown.append(decoder.push(0, may_stop=number >= least))
        if decoder.matched is not None:
            break
    else:
        shown.append(decoder.flush(may_stop=len(pieces) >= least))
    assert (shown, decoder.matched) == plain_stops(pieces, tail, stops, least)
    assert decoder.matched is None or decoder.flush() == ""


def test_a_token_costs_the_same_however_long_the_stop_strings_are():
    """16 of a thousand characters took the engine, and all other answers, milliseconds for each token."""
    decoder = TextStream(Pieces(["aaaa"] * 20_000), ["a" * 60_000 + "b"])
    assert len("".join(decoder.push(0) for _ in range(20_000))) == 20_000


def test_tokens_without_a_text_do_not_pile_up():
    """A model may have more ids than its tokenizer; all of them were decoded again for each token."""
    tokenizer = sentencepiece_style()
    decoder = Detokenizer(tokenizer)
    word = tokenizer.encode("fox", add_special_tokens=False)
    text = "".join(map(decoder.push, word))
    for token in range(10_000, 11_000):
        text += decoder.push(token)
        assert len(decoder._window) < 20
    text += "".join(map(decoder.push, word)) + decoder.flush()
    assert text == tokenizer.decode([*word, *word]) == "fox fox"


def test_special_tokens_are_skipped_and_added_ones_keep_their_spaces():
    tokenizer = byte_level()
    ids = tokenizer.encode("<|im start|>hello</s>")
    assert ids[0] == 0 and 2 in ids and ids[-1] == 1
    assert "".join(stream(tokenizer, ids)) == "hello"


def test_the_space_before_a_continuation_is_kept_and_before_a_new_text_is_not():
    tokenizer = sentencepiece_style()
    prompt, word = tokenizer.encode("the quick", add_special_tokens=False), tokenizer.encode("fox")
    continued = Detokenizer(tokenizer, prompt)
    assert "".join(continued.push(token) for token in word) == " fox"
    fresh = Detokenizer(tokenizer, [*prompt, tokenizer.token_to_id("</s>")])
    assert "".join(fresh.push(token) for token in word) == "fox"


@pytest.mark.parametrize(("prompt", "more"), [("你好", "世界"), ("好世", "界"), ("👩\u200d", "👩x")])
def test_an_answer_goes_on_with_bytes_where_its_prompt_ended_with_them(prompt, more):
    """The tokens kept of the prompt begin in the middle of a character."""
    tokenizer = sentencepiece_style()
    before = tokenizer.encode(prompt, add_special_tokens=False)
    whole = tokenizer.encode(prompt + more, add_special_tokens=False)
    assert whole[: len(before)] == before
    decoder = Detokenizer(tokenizer, before)
    assert "".join(map(decoder.push, whole[len(before) :])) + decoder.flush() == more
