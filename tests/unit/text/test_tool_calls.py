"""Tool calls in a model's text: whatever the pieces in which it arrives, the same text and the same calls."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_server.text.tool_calls import (
    CLOSE,
    FORMATS,
    OPEN,
    ForcedCallReader,
    StreamingReader,
    ToolCall,
    call_rules,
    format_of,
)
from tests.support.text.text_tokenizers import compiled, taken, with_tokens

NAMES = ("weather", "clock")
BERN = {"city": "Bern"}
CLOCKED = ("clock", {})


def call(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments})


def tagged(*texts):
    return "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts)


def read(kind, pieces):
    reader = FORMATS[kind](NAMES)
    found = [*map(reader.feed, pieces), reader.end()]
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


ANSWERS = [
    ("hermes", "Look: " + tagged(call("weather", BERN)), "Look: ", [("weather", BERN)]),
    ("hermes", tagged(call("weather", BERN), call("clock", {})) + "\n Done. ", "Done. ", [("weather", BERN), CLOCKED]),
    ("hermes", "<tool_call>" + call("clock", {}), "", [CLOCKED]),  # the end tag was cut off
    ("hermes", "<think>Use <tool_call>.</think>\n" + tagged(call("clock", {})), "<think>Use <tool_call>.</think>\n",
     [CLOCKED]),
    ("hermes", tagged(call("weather", {"city": f'"{CLOSE}\\\n'})) + "c", "c", [("weather", {"city": f'"{CLOSE}\\\n'})]),
    ("hermes", f'<tool_call>{{"x{CLOSE}' + tagged(call("clock", {})), f'<tool_call>{{"x{CLOSE}', [CLOCKED]),
    ("hermes", tagged('{"x": 1} <tool_call> ' + call("clock", {})), '<tool_call>\n{"x": 1} ', [CLOCKED]),
    ("hermes", OPEN + " " * 60 + call("clock", {}), "", [CLOCKED]),
    ("hermes", tagged('{"name": "clock", "arguments": null}'), "", [CLOCKED]),
    ("hermes", tagged(call("weather", json.dumps(BERN)), call("clock", "")), "", [("weather", BERN), CLOCKED]),
    ("llama3_json", "\n " + call("weather", BERN, "parameters"), "", [("weather", BERN)]),
    ("llama3_json", call("weather", BERN, "parameters") + "; " + call("clock", {}), "", [("weather", BERN), CLOCKED]),
    ("mistral", "Sure. [TOOL_CALLS] [" + call("weather", BERN) + "]", "Sure. ", [("weather", BERN)]),
    ("mistral", '[TOOL_CALLS][{"name": "clock", "arguments": {}, "id": "123456789"}, ' + call("clock", {}) + "]\n", "",
     [CLOCKED, CLOCKED]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "[TOOL_CALLS]"}[TOOL_CALLS]clock{} Done.', "Done.",
     [("weather", {"city": "[TOOL_CALLS]"}), CLOCKED]),
    ("mistral", "[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]clock[ARGS]{", "[TOOL_CALLS]clock[ARGS]{", [CLOCKED]),
    ("mistral", "The tag [TOOL_CALLS], then: [TOOL_CALLS]clock{}", "The tag [TOOL_CALLS], then: ", [CLOCKED]),
    ("mistral", "[TOOL_CALLS]" + " " * 64 + "clock{}", "", [CLOCKED]),
]  # fmt: skip
TEXTS = [
    ("hermes", "<tool_call>" + call("clock", {})[:-1]),
    ("hermes", "a <tool_call>x</tool_call> b"),
    ("hermes", "a <tool_ca"),
    ("hermes", tagged(call("unknown", {}))),
    ("hermes", tagged(call("clock", [1]))),
    ("hermes", tagged(call("clock", "[1]"), call("clock", "{"))),
    ("hermes", tagged(call("clock", {}) + call("clock", {}))),
    ("hermes", f'<tool_call>{{"x": "{CLOSE} a'),
    ("hermes", OPEN + " " * 100),
    ("hermes", tagged('{"name": "clock", "arguments": {"x": 1e999}}')),
    ("hermes", tagged('{"name": "clock", "arguments": {"x": "\\ud83d"}}')),
    ("llama3_json", " " * 100 + call("clock", {})),
    ("llama3_json", call("clock", {}) + " and more"),
    ("llama3_json", '{"name": "clock", "parameters": {"x": NaN}}'),
    ("llama3_json", '{"name":' * 100_000),
    ("llama3_json", ""),
    ("mistral", "[TOOL_CALLS]tide[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]clock[ARGS][1]"),
    ("mistral", f"[TOOL_CALLS][{call('clock', {})}, {call('tide', {})}]"),
    ("mistral", "[TOOL_CALLS]" + call("clock", {})),
    ("mistral", "a [TOOL_ b [TOOL_CALLS] c"),
    ("mistral", "[TOOL_CALLS]" + " " * 65 + "clock{}"),
    ("mistral", "[TOOL_CALLS]" + "[" * 100_000),
]


@pytest.mark.parametrize(
    ("kind", "answer", "text", "calls"),
    [*ANSWERS, *((kind, text, text, []) for kind, text in TEXTS)],
    ids=lambda value: str(value)[:40],
)
def test_calls_are_taken_out_of_the_text(kind, answer, text, calls):
    assert read(kind, [answer]) == (text, [ToolCall(name, json.dumps(arguments)) for name, arguments in calls])
    assert read(kind, answer[:2000]) == read(kind, [answer[:2000]]), "one character at a time"


@given(st.data())
def test_pieces_make_no_difference(data):
    kind = data.draw(st.sampled_from(sorted(FORMATS)))
    tags = ["<tool_call>", "</tool_call>", "<", "tool_", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[", "]", "TOOL_"]
    parts = [*tags, "{", "}", ";", "\n", " ", "x", call("clock", {}), '"', "clock", "clo"]
    pieces = data.draw(st.lists(st.sampled_from(parts), max_size=12))
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole = read(kind, [text])
    assert read(kind, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    if not whole[1]:
        assert whole[0] == text, "nothing is lost"


def test_text_is_not_held_longer_than_it_may_be_a_call():
    reader = FORMATS["hermes"](NAMES)
    assert reader.feed("a < b") == ("a < b", [])
    assert reader.feed("<tool") == ("", []) and reader.feed("s>") == ("<tools>", [])
    reader = FORMATS["mistral"](NAMES)
    assert reader.feed("a [") == ("a ", []) and reader.feed("0]") == ("[0]", [])
    assert reader.feed("[TOOL_CALLS] clo") == ("", []) and reader.feed("ud") == ("[TOOL_CALLS] cloud", [])
    assert reader.feed("[TOOL_CALLS]clock") == ("", []) and reader.feed("work") == ("[TOOL_CALLS]clockwork", [])
    reader = FORMATS["llama3_json"](NAMES)
    assert reader.feed(" ") == ("", []) and reader.feed("so") == (" so", []) and reader.feed("{") == ("{", [])


def test_what_can_be_decoded_and_not_encoded_again_is_text():
    """The limits of both recursions differ, so that a call may be within one and not within the other."""
    for depth in range(300, sys.getrecursionlimit() + 50, 7):
        text = '{"name": "clock", "arguments": {"x": ' + "[" * depth + "]" * depth + "}}"
        said, calls = read("llama3_json", [text])
        assert bool(said) != bool(calls)


@pytest.mark.parametrize("text", ["[TOOL_CALLS]", "[TOOL_CALLS]clock{", '[TOOL_CALLS][{"a":['])
def test_an_answer_of_tags_is_not_read_again_from_each_of_them(text):
    """That took 6 seconds of the one thread that serves everyone for 32,000 tags, and four times as long for twice."""
    answer = "[TOOL_CALLS]clock" + text * 1_000_000
    assert read("mistral", [answer]) == (answer, [])


def test_the_format_is_that_of_the_template():
    hermes = '{% for t in tools %}{% endfor %}<tool_call>{"name": n, "arguments": a}</tool_call>'
    llama = '{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}'
    assert format_of([hermes]) == "hermes" and format_of(["plain", llama]) == "llama3_json"
    assert format_of([]) is None and format_of(["{{ messages }}"]) is None
    assert format_of([hermes.replace("tools", "messages")]) is None, "it shows no tools"
    assert format_of(["{{ tools }}<tool_call><function=x>"]) is None, "XML inside"
    assert format_of(["{{ tools }}[TOOL_CALLS]"]) == "mistral"
    assert format_of(["{{ messages }}[TOOL_CALLS]"]) is None


CITY = {"properties": {"city": {"enum": ["Bern", "Basel"]}}, "required": ["city"], "additionalProperties": False}
CLOCK = {"properties": {}, "additionalProperties": False}
MISTRAL, NAMED = ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
FORCED = [
    ("hermes", (), tagged(call("weather", BERN), call("clock", {}))[:-1]),
    ("hermes", ("<tool_call>", "</tool_call>"), tagged(call("weather", BERN))[:-1]),
    ("llama3_json", (), call("weather", BERN, "parameters") + "; " + call("clock", {}, "parameters")),
    ("mistral", (), f"[TOOL_CALLS][{call('weather', BERN)}]"),
    ("mistral", MISTRAL, f"[TOOL_CALLS] [{call('weather', BERN)}, {call('clock', {})}]"),
    ("mistral", MISTRAL, '[TOOL_CALLS][{"name": "clock", "arguments": {}, "id": "a1B2c3D4e"}]'),
    ("mistral", NAMED, '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}'),
    ("mistral", NAMED, '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Bern"}[TOOL_CALLS]clock[ARGS]{}'),
]


@pytest.mark.parametrize(("kind", "tokens", "answer"), FORCED, ids=lambda value: str(value)[:60])
def test_a_call_that_must_be_made_is_written_as_the_model_was_trained_to(kind, tokens, answer):
    """The grammar takes this answer, token by token, then its end; and nothing before a call, nor other arguments."""
    tokenizer = with_tokens(*tokens)
    rules = call_rules(kind, [("weather", CITY), ("clock", CLOCK)], True, tokenizer, tokenizer.vocab_size)
    grammar = compiled(tokenizer, grammar="\n".join(["start: calls", *rules]), made=True)
    assert taken(tokenizer, grammar, answer) == "all"
    assert taken(tokenizer, grammar, "x" + answer) == "" and taken(tokenizer, grammar, answer + "x") == answer
    other = answer.replace("clock", "tide").replace("Bern", "Rome")
    assert other.startswith(taken(tokenizer, grammar, other)) and taken(tokenizer, grammar, other) != other
    said, calls = read(kind, [answer])
    assert not said and calls and {one.name for one in calls} <= set(NAMES)


def written(pieces):
    """The calls of an answer that must be calls, from what each piece adds."""
    reader = ForcedCallReader()
    calls = []
    for piece in pieces:
        for one in reader.feed(piece):
            if one.name:
                calls.append((one.name, ""))
            calls[-1] = calls[-1][0], calls[-1][1] + one.arguments
    return calls, reader.inside


@pytest.mark.parametrize(("kind", "tokens", "answer"), FORCED, ids=lambda value: str(value)[:60])
def test_a_call_that_was_cut_has_its_name_and_the_arguments_so_far(kind, tokens, answer):
    whole = [(one.name, json.loads(one.arguments)) for one in read(kind, [answer])[1]]
    for end in range(len(answer) + 1):
        found, inside = written([answer[:end]])
        assert written(answer[:end]) == (found, inside), "one character at a time"
        assert [name for name, _ in found] == [name for name, _ in whole[: len(found)]]
        for place, ((_, text), (_, arguments)) in enumerate(zip(found, whole, strict=False)):
            assert json.dumps(arguments).startswith(text)
            assert (place == len(found) - 1 and inside) or json.loads(text) == arguments
    assert [(name, json.loads(text)) for name, text in found] == whole and not inside
    first = answer.index(json.dumps(whole[0][1]))
    assert written([answer[:first]]) == ([(whole[0][0], "")], True) and written([answer[: first - 1]]) == ([], False)


def streamed(kind, pieces):
    """Text, calls with their arguments as written, how many pieces these had, and whether a call was cut."""
    reader = StreamingReader(FORMATS[kind](NAMES), NAMES)
    said, calls, count = "", [], 0
    for text, found in [*map(reader.feed, pieces), reader.end()]:
        said, count = said + text, count + len(found)
        for one in found:
            if one.name:
                calls.append((one.name, ""))
            calls[-1] = calls[-1][0], calls[-1][1] + one.arguments
    return said, calls, count, reader.cut


WHOLE = [one for one in ANSWERS if not one[2].endswith("{")]  # without a call that is cut, which is one in a stream


@pytest.mark.parametrize(("kind", "answer", "text", "calls"), WHOLE, ids=lambda value: str(value)[:40])
def test_a_stream_has_the_same_calls(kind, answer, text, calls):
    for pieces in ([answer], answer, [answer[:30], answer[30:]]):
        said, found, _, cut = streamed(kind, pieces)
        assert (said, [(name, json.loads(one)) for name, one in found], cut) == (text, calls, False)


@pytest.mark.parametrize(
    ("kind", "text"), [one for one in TEXTS if len(one[1]) < 1000], ids=lambda value: str(value)[:40]
)
def test_a_stream_of_what_only_looks_like_a_call_loses_no_text_but_that_of_a_call_that_was_begun(kind, text):
    said, calls, _, cut = streamed(kind, text)
    assert cut == bool(calls) and (said == text or calls)


@pytest.mark.parametrize(("kind", "tokens", "answer"), FORCED, ids=lambda value: str(value)[:60])
def test_arguments_come_as_they_are_written(kind, tokens, answer):
    """One character at a time; a call that is cut within its arguments is no text."""
    whole = [(one.name, json.loads(one.arguments)) for one in read(kind, [answer])[1]]
    said, calls, count, cut = streamed(kind, answer)
    assert not said and [(name, json.loads(text)) for name, text in calls] == whole and not cut
    assert count == sum(len(text) for _, text in calls), "the name with the first brace"
    end = answer.index("}") - (2 if "Bern" in answer else 0)
    name, arguments = calls[0]
    said, calls, _, cut = streamed(kind, answer[:end])
    assert (said, cut) == ("", True) and calls[0][0] == name and arguments.startswith(calls[0][1])


@given(st.data())
def test_a_stream_in_any_pieces_has_the_calls_that_there_are(data):
    kind = data.draw(st.sampled_from(sorted(FORMATS)))
    parts = [OPEN, CLOSE, "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", ";", "\n", "x", call("clock", {}), '"', "clock"]
    text = "".join(data.draw(st.lists(st.sampled_from([*parts, call("weather", BERN)]), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole = [one.name for one in read(kind, [text])[1]]
    said, calls, _, cut = streamed(kind, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    found = iter([name for name, _ in calls])
    assert all(name in found for name in whole), "in their order"
    assert cut or (len(calls) == len(whole) and said == read(kind, [text])[0])


def test_a_call_within_the_arguments_of_a_call_that_was_cut_is_none():
    inner = call("clock", {"x": call("clock", {})})
    arguments = '{"a": ' + inner + ', "b": ' + json.dumps(inner + '\\" }')
    for pieces in ([arguments], arguments):
        calls, inside = written(['{"name": "weather", "arguments": ', *pieces])
        assert calls == [("weather", arguments)] and inside


def test_a_tag_that_the_model_has_no_token_for_is_text():
    """As a token it could not be sampled, and nothing else would be allowed."""
    tokenizer = with_tokens(*MISTRAL)
    for vocab_size, is_token in ((tokenizer.vocab_size, True), (tokenizer.token_to_id(MISTRAL[0]), False)):
        rules = call_rules("mistral", [("clock", CLOCK)], False, tokenizer, vocab_size)
        assert ("<[" in rules[0]) == is_token and ('"[TOOL_CALLS]"' in rules[0]) != is_token
