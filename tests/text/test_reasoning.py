"""The model's reasoning in its answer: whatever the pieces, it is told from the rest, and no grammar constrains it."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nxd_server.text.grammars import Grammars
from nxd_server.text.reasoning import ReasoningReader, begins_in_reasoning, free_reasoning, reasons
from nxd_server.text.structured_outputs import StructuredOutputs
from nxd_server.text.tags import with_tags_shown
from nxd_server.text.tokenizer import Tokenizer
from tests.text.text_tokenizers import byte_level

pytestmark = pytest.mark.check

ANSWERS = [
    (False, "<think>\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
    (False, "\n <think>a\n\nb</think>c", "a\n\nb", "c"),
    (True, "\nTwo and two.\n</think>\n\nFour.\n", "Two and two.", "Four.\n"),
    (False, "Four. <think>x</think>", "", "Four. <think>x</think>"),
    (False, "  Four.", "", "  Four."),
    (False, "<thin", "", "<thin"),
    (False, "\n", "", "\n"),
    (False, " " * 65 + "<think>a</think>", "", " " * 65 + "<think>a</think>"),
    (False, "<think>cut o", "cut o", ""),
    (True, "a </thi", "a </thi", ""),
    (True, "a < b </think>", "a < b", ""),
    (True, "</think>x</think>", "", "x</think>"),
    (False, "<think>\n\n</think>\n\nFour.", "", "Four."),
    (True, "<think>a</think>b", "<think>a", "b"),
    (True, "", "", ""),
]


def read(begun, pieces):
    reader = ReasoningReader(begun)
    found = [*map(reader.feed, pieces), reader.end()]
    return tuple("".join(parts) for parts in zip(*found, strict=True))


@pytest.mark.parametrize(("begun", "answer", "thought", "said"), ANSWERS)
def test_reasoning_is_told_from_the_answer(begun, answer, thought, said):
    assert read(begun, [answer]) == read(begun, answer) == (thought, said)


@given(st.booleans(), st.data())
def test_pieces_make_no_difference(begun, data):
    parts = ["<think>", "</think>", "<", "</", "think", ">", "\n", " ", "x"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    thought, said = read(begun, pieces)
    assert (thought, said) == read(begun, [text])
    for kept in (thought, said):
        assert kept in text


def test_reasoning_is_shown_as_it_comes():
    reader = ReasoningReader(False)
    assert [reader.feed(piece) for piece in ("<think>", "\n", "a", " ", "b<", "c")] == [
        ("", ""),
        ("", ""),
        ("a", ""),
        ("", ""),
        (" b", ""),
        ("<c", ""),
    ]


def test_what_is_held_is_not_joined_again_with_each_piece():
    for begun in (False, True):
        reader = ReasoningReader(begun)
        reader.feed("x" if begun else "")
        for _ in range(1000):
            reader.feed(" " * 100)
        assert len(reader._held) <= 100


def test_the_prompt_and_the_template_say_how_the_answer_begins():
    assert begins_in_reasoning("<|im_start|>assistant\n") is None
    assert begins_in_reasoning("<think>user text<|im_start|>assistant\n<think>\n") is True
    assert begins_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n") is False
    assert reasons(["plain", "{% if '</think>' in content %}"]) and not reasons(["{{ messages }}"])


def with_tokens(*names):
    raw = tokenizers.Tokenizer.from_str(byte_level().raw.to_str())
    raw.add_special_tokens(list(names))
    return Tokenizer(raw, byte_level().config)


def test_tags_that_are_special_tokens_are_shown():
    hidden = with_tokens("<think>", "</think>")
    ids = hidden.encode("<think>a</think>b", add_special_tokens=False)
    shown = with_tags_shown(hidden, ["<think>", "</think>"])
    assert shown.encode("<think>a</think>b", add_special_tokens=False) == ids
    assert (hidden.decode(ids), shown.decode(ids)) == ("ab", "<think>a</think>b")
    assert with_tags_shown(hidden, ["<other>"]) is hidden


@pytest.mark.parametrize("begun", [False, True])
def test_no_grammar_constrains_the_reasoning(begun):
    """It may be any text without the answer's end; behind it, or without it, the answer is the grammar's."""
    tokenizer = with_tokens("<think>", "</think>")
    end = tokenizer.eos_token_id
    compiled = Grammars(tokenizer, tokenizer.vocab_size, [end]).compiled(StructuredOutputs(choice=["yes", "no"]))
    free = free_reasoning(tokenizer, begun)

    def taken(grammar, text, banned=()):
        guide, words = grammar.guide(), np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        ids = tokenizer.encode(text, add_special_tokens=False)
        for place, token in enumerate([*ids, end]):
            guide.allow(words, banned)
            assert not guide.complete or token == end
            if not words.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1:
                return tokenizer.decode(ids[:place])
            guide.take(token)
        return "all"

    opening, grammar = "" if begun else "<think>", compiled.behind(free)
    assert taken(grammar, f"{opening}Hm, maybe. no?</think>yes") == "all"
    assert taken(grammar, f"{opening}Hm, maybe.</think>maybe").startswith("Hm, maybe.")
    assert taken(grammar, f"{opening}Hm") == "Hm", "an answer does not end within its reasoning"
    assert taken(grammar, f"{opening}Hm</think>yes", banned=[tokenizer.raw.token_to_id("H")]) == ""
    assert taken(grammar, f"{opening}Hm</think><think>a</think>yes") == "Hm", "it reasons only once"
    assert taken(grammar, "yes") == ("yes" if begun else "all")
    assert taken(compiled, "yes") == "all" and taken(compiled, "<think>") == "", (
        "and the grammar itself has not changed"
    )


def test_tags_of_several_tokens_leave_no_room_for_reasoning():
    assert free_reasoning(byte_level(), True) is None
