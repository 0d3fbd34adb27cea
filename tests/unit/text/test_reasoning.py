"""The model's reasoning in its answer: whatever the pieces, it is told from the rest, and no grammar constrains it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_server.text.reasoning import FORMATS, ReasoningCounter, ReasoningReader, free_reasoning, place_behind, tags_of
from tests.support.text.text_tokenizers import byte_level, compiled, taken, with_tokens

THINK = FORMATS["think"]
BEFORE, INSIDE = "before", "inside"
ANSWERS = [
    (BEFORE, "<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (INSIDE, "\nTwo and two.\n</think>\n\nFour.\n", "Two and two.", "Four.\n"),
    (BEFORE, "Four. <think>x</think>", "", "Four. <think>x</think>"),
    (BEFORE, "<thin", "", "<thin"),
    (BEFORE, " " * 65 + "<think>a</think>", "", " " * 65 + "<think>a</think>"),
    (BEFORE, "<think>cut o", "cut o", ""),
    (INSIDE, "a </thi", "a </thi", ""),
    (INSIDE, "</think>x</think>", "", "x</think>"),
    (INSIDE, "\n<think>\na</think>b", "a", "b"),
    (BEFORE, "<think>a</think>\r\n\n    b\n", "a", "    b\n"),
]


def read(place, pieces, exact=False):
    reader = ReasoningReader(THINK, place, exact)
    found = [*map(reader.feed, pieces), reader.end()]
    return tuple("".join(parts) for parts in zip(*found, strict=True))


@pytest.mark.parametrize(("place", "answer", "thought", "said"), ANSWERS)
def test_reasoning_is_told_from_the_answer(place, answer, thought, said):
    assert read(place, [answer]) == read(place, answer) == (thought, said)


@pytest.mark.parametrize(
    ("place", "answer", "count"),
    [
        (BEFORE, "<think>\nTwo.\n</think>\n\nFour.", 6),
        (BEFORE, "Four. <think>x</think>", 0),
        (BEFORE, " " * 80 + "<think>a", 0),
        (INSIDE, "a <<b </think> <think>c", 6),
        ("over", "a</think>", 0),
    ],
)
def test_tokens_between_the_tags_are_counted(place, answer, count):
    """Whether the closing tag is one token or several."""
    counter = ReasoningCounter(THINK, place, chr)
    for char in answer:
        counter.take(ord(char))
    assert counter.count == count
    pieces = [piece for part in re.split("(</?think>)", answer) for piece in ([part] if "think>" in part else part)]
    counter = ReasoningCounter(THINK, place, pieces.__getitem__)
    for token in range(len(pieces)):
        counter.take(token)
    assert counter.count == count


@given(st.sampled_from([BEFORE, INSIDE]), st.data())
def test_pieces_make_no_difference(place, data):
    parts = ["<think>", "</think>", "<", "</", "think", ">", "\n", " ", "x"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    thought, said = read(place, pieces)
    assert (thought, said) == read(place, [text])
    for kept in (thought, said):
        assert kept in text


def test_reasoning_is_shown_as_it_comes():
    reader = ReasoningReader(THINK, BEFORE)
    shown = [reader.feed(piece)[0] for piece in ("<think>", "\n", "a", " ", "b<", "c")]
    assert shown == ["", "", "a", "", " b", "<c"]


def test_the_prompt_and_the_template_say_how_the_answer_begins():
    assert place_behind("<|im_start|>assistant\n", THINK) == BEFORE
    assert place_behind("<think>user text<|im_start|>assistant\n<think>\n", THINK) == INSIDE
    assert place_behind("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK) == "over"
    assert tags_of(["plain", "{% if '</think>' in content %}"]) == THINK and tags_of(["{{ messages }}"]) is None
    assert tags_of(["[SYSTEM_PROMPT][THINK]x[/THINK]"]) == FORMATS["mistral"]


def test_tags_that_are_special_tokens_are_shown():
    hidden = with_tokens("<think>", "</think>")
    ids = hidden.encode("<think>a</think>b", add_special_tokens=False)
    shown = hidden.showing(["<think>", "</think>"])
    assert shown.encode("<think>a</think>b", add_special_tokens=False) == ids
    assert (hidden.decode(ids), shown.decode(ids)) == ("ab", "<think>a</think>b")
    assert hidden.showing(["<other>"]) is hidden


@pytest.mark.parametrize("place", [BEFORE, INSIDE])
def test_no_grammar_constrains_the_reasoning(place):
    """It may be any text without the answer's end; behind it, or without it, the answer is the grammar's."""
    tokenizer = with_tokens(*THINK).showing(THINK)
    plain = compiled(tokenizer, choice=["yes", "no"])
    grammar = plain.behind(free_reasoning(tokenizer, tokenizer.vocab_size, THINK, place))
    opening = "<think>" if place == BEFORE else ""

    def takes(text, **more):
        return taken(tokenizer, grammar, text, **more)

    assert takes(f"{opening}Hm, maybe. no?</think>yes") == "all"
    assert takes(f"{opening}Hm, maybe.</think>maybe") == f"{opening}Hm, maybe.</think>"
    assert takes(f"{opening}Hm") == f"{opening}Hm", "an answer does not end within its reasoning"
    assert takes(f"{opening}Hm</think>yes", banned=[tokenizer.token_to_id("H")]) == opening
    assert takes(f"{opening}Hm</think><think>a</think>yes") == f"{opening}Hm</think>", "it reasons only once"
    assert takes("yes") == ("yes" if place == INSIDE else "all")
    assert taken(tokenizer, plain, "yes") == "all" and taken(tokenizer, plain, "<think>") == "", "it has not changed"


@pytest.mark.parametrize("shown", [(), ("<think>",)], ids=["no tokens", "the first is one"])
def test_the_reader_and_the_grammar_agree_where_the_reasoning_ends(shown):
    """Also if the closing tag is written in pieces, as a model may that quotes it."""
    tokenizer = with_tokens(*shown).showing(shown)
    free = free_reasoning(tokenizer, tokenizer.vocab_size, THINK, INSIDE)
    grammar = compiled(tokenizer, choice=[" yes"]).behind(free)
    answer = "a </think> yes"  # whose blank the format asks for
    assert taken(tokenizer, grammar, answer) == "all"
    assert read(INSIDE, [answer], exact=True) == ("a", " yes")


def test_a_tag_that_the_model_cannot_write_leaves_no_room_for_reasoning():
    tokenizer = with_tokens(*THINK)
    first = tokenizer.token_to_id("<think>")
    for vocab_size, place, room in ((first + 2, BEFORE, True), (first, BEFORE, False), (first, INSIDE, True)):
        assert (free_reasoning(tokenizer, vocab_size, THINK, place) is not None) == room
    assert free_reasoning(byte_level(), 2**31, THINK, BEFORE) is None
    assert free_reasoning(tokenizer, first + 2, THINK, "over") is None
