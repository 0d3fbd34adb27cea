"""Grammars of answers by themselves: what they allow, what is refused, and what hostile ones cost."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from nxd_server.engine import SamplingParams
from nxd_server.engine.sampling_params import sampler_of
from nxd_server.errors import RequestError
from nxd_server.text.grammars import Grammars
from nxd_server.text.structured_outputs import MOST_CHARACTERS, StructuredOutputs
from nxd_server.text.tokenizer import Tokenizer
from tests.support.text.text_tokenizers import byte_level, compiled


@pytest.fixture(autouse=True)
def slow_cores_may_take_longer(monkeypatch):
    monkeypatch.setattr("nxd_server.text.grammars.SECONDS", 60.0)


def drawn(tokenizer, grammar, rng, most):
    """A text of at most so many random tokens that the grammar allows; None where it has not ended by then."""
    guide, words, ids = grammar.guide(), np.zeros(-(-tokenizer.vocab_size // 32), np.int32), []
    while len(ids) < most:
        if guide.complete:
            return tokenizer.decode(ids)
        guide.allow(words)
        token = int(rng.choice(np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0]))
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(ids)
        guide.take(token)
        ids.append(token)
    return None


INTEGER = {"type": "integer", "minimum": -99, "maximum": 401}
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
SCHEMAS = [
    INTEGER,
    {"type": "string", "pattern": "[a-c]+[0-9]{2}", "maxLength": 8},
    {"enum": ["a b", 'é"', True, None, -3, 1.5]},
    {"const": {"a": [1, {"b c": None}]}},
    {"type": "array", "items": {"anyOf": [INTEGER, {"type": "boolean"}]}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"a": INTEGER, "b c": {"type": "null"}, 'd"': {"enum": ["x"]}, "é": {"type": "boolean"}},
        "required": ["b c", "é"],
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_json_of_a_schema_is_accepted_by_a_validator(schema):
    grammar = compiled(byte_level(), json=schema)
    texts = [drawn(byte_level(), grammar, random.Random(seed), 2000) for seed in range(8)]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert "const" in schema or len(set(texts)) > 1


def any_schema(rng: random.Random, depth: int = 3) -> dict:
    """A schema of the keywords that people and their libraries write, which some value of few tokens satisfies."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "pattern", "format"]
    kind = rng.choice(kinds + 2 * ["array", "tuple", "object", "map", "anyOf"] if depth else kinds)
    low, inner = rng.randint(-50, 50), depth - 1
    names = rng.sample(["a", "b c", 'd"e', "é", "long_name", "$f", ""], rng.randint(0, 4))
    values = rng.sample([None, True, -3, 2.5, "x", 'a "b"\n', [], [1, {"k": None}], {"z": []}], rng.randint(1, 4))
    return {
        "integer": lambda: {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
        "number": lambda: {"type": "number", "exclusiveMinimum": low, "maximum": low + 1.5},
        "string": lambda: {"type": ["string", "null"], "minLength": low % 4, "maxLength": low % 4 + rng.randint(0, 6)},
        "boolean": lambda: {"type": "boolean", "title": "T", "description": "D", "default": False},
        "null": lambda: {"type": "null"},
        "enum": lambda: {"enum": values},
        "const": lambda: {"const": values[0]},
        "pattern": lambda: {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^(ab|c)+[0-9]$", "x?y"])},
        "format": lambda: {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "ipv6", "email"])},
        "array": lambda: {"type": "array", "items": any_schema(rng, inner), "minItems": low % 2, "maxItems": 3},
        "tuple": lambda: {"type": "array", "prefixItems": [any_schema(rng, inner) for _ in values], "items": False},
        "object": lambda: {
            "type": "object",
            "properties": {name: any_schema(rng, inner) for name in names},
            "required": names[: rng.randint(0, len(names))],
            "additionalProperties": False,
        },
        "map": lambda: {"type": "object", "additionalProperties": any_schema(rng, inner)},
        "anyOf": lambda: (
            {
                "anyOf": [any_schema(rng, inner), {"$ref": "#/$defs/d"}],
                "$defs": {"d": any_schema(rng, 0)},
            }
            if depth == 3
            else {"anyOf": [any_schema(rng, inner) for _ in values]}
        ),
    }[kind]()


@pytest.mark.parametrize("part", range(10))
def test_complete_answers_of_random_schemas_are_accepted_by_a_validator(part: int):
    complete = 0
    for seed in range(50 * part, 50 * part + 50):
        rng = random.Random(seed)
        schema = any_schema(rng)
        text = drawn(byte_level(), compiled(byte_level(), json=schema), rng, 400)
        if text is not None:  # cut: not complete
            complete += 1
            jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
    assert complete >= 35


WRONG = [
    ({"json": {}, "regex": "a"}, "structured_outputs", "json and regex"),
    ({"schema": {}}, "structured_outputs", "'schema'"),
    ([1], "structured_outputs", "must be an object"),
    ({"json": 3}, "structured_outputs.json", "a JSON schema"),
    ({"json": "[1"}, "structured_outputs.json", "an object, or its text"),
    ({"json": {"enum": []}}, "structured_outputs.json", "Unsatisfiable"),
    ({"json_object": False}, "structured_outputs.json_object", "must be true"),
    ({"regex": "(?=a)b"}, "structured_outputs.regex", "look-ahead"),
    ({"regex": "(a"}, "structured_outputs.regex", "unclosed group"),
    ({"regex": "a\\"}, "structured_outputs.regex", "ends with a backslash"),
    ({"regex": "x" * (MOST_CHARACTERS + 1)}, "structured_outputs.regex", "at most"),
    ({"regex": 3}, "structured_outputs.regex", "a string"),
    ({"choice": []}, "structured_outputs.choice", "one or more"),
    ({"choice": "yes"}, "structured_outputs.choice", "a list"),
    ({"grammar": "hello"}, "structured_outputs.grammar", "Expected ::="),
    ({"grammar": "start: nothing"}, "structured_outputs.grammar", '"nothing"'),
]


@pytest.mark.parametrize(("asked", "field", "why"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_constraint_is_refused_by_its_field(asked, field, why):
    with pytest.raises(RequestError, match=re.escape(why)) as raised:
        Grammars(byte_level(), byte_level().vocab_size, [1]).compiled(StructuredOutputs.of(asked))
    assert raised.value.field == field


def rules(count, of):
    return "\n".join(of.format(number=number, next=number + 1) for number in range(count))


HOSTILE = {
    "ambiguous": "start: s\ns: " + " | ".join(f"s s t{number}" for number in range(60)) + " | A\nA: /[a-z]{1,3}/\n"
    + rules(60, "t{number}: A?"),
    "a chain of rules": rules(4000, "a{number}: a{next}").replace("a0:", "start:") + '\na4000: "x"',
}  # fmt: skip


@pytest.mark.parametrize("grammar", HOSTILE)
def test_a_hostile_grammar_is_too_complex_or_costs_little(grammar):
    """Of 1 to 60 kB: without limits they ended the process, or took seconds for each token."""
    assert len(HOSTILE[grammar]) < MOST_CHARACTERS
    try:
        drawn(byte_level(), compiled(byte_level(), grammar=HOSTILE[grammar]), random.Random(0), 20)
        assert grammar != "ambiguous"
    except RequestError as error:
        assert "too complex" in str(error) and len(str(error)) < 700


def test_a_hostile_schema_costs_little():
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(1500)} | {"a1500": {"type": "null"}}
    grammar = compiled(byte_level(), json={"$ref": "#/$defs/a0", "$defs": chain})
    assert drawn(byte_level(), grammar, random.Random(0), 99) == "null"
    optional = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(1500)}}
    with pytest.raises(RequestError, match=r"^structured_outputs: the grammar is too complex"):
        drawn(byte_level(), compiled(byte_level(), json=optional), random.Random(0), 99)


def test_many_choices_and_special_names_in_them():
    many = [f"choice {number}" for number in range(3000)]
    assert drawn(byte_level(), compiled(byte_level(), choice=many), random.Random(0), 99) in many
    # The text of a special token's name, which no special token stands for; and what is special in other notations.
    names = ("<|im start|>", "</s>x", "%llguidance", 'a"b\\c/d\n', "[a-z]+", "$^.*", "日本🤗")
    forms = [({"choice": [text]}, text) for text in names]
    forms += [({"json": {"const": text}}, text) for text in names]
    for notation in ('root ::= "</s>"', 'start: "</s>"', '%llguidance {"no_forcing": true}\nstart: "</s>"'):
        forms.append(({"grammar": notation}, "</s>"))
    for asked, text in forms:
        found = drawn(byte_level(), compiled(byte_level(), **asked), random.Random(0), 99)
        assert (json.loads(found) if "json" in asked else found) == text


def test_what_cannot_follow_a_grammar_says_so():
    asked = StructuredOutputs(choice=["a"])
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(RequestError, match="names no token that ends an answer"):
        Grammars(byte_level(), byte_level().vocab_size, []).compiled(asked)
    with pytest.raises(RequestError, match=r"^structured_outputs: structured outputs need a tokenizer of bytes"):
        Grammars(Tokenizer(wordpiece), 2, [0]).compiled(asked)
    params = SamplingParams(structured_outputs=asked)
    with pytest.raises(RequestError, match="no input 'allowed', so structured_outputs cannot act"):
        sampler_of(params, 1, {"temperature", "seed"}, 100, 0, ())


def test_masks_of_models_with_more_or_fewer_tokens_than_the_tokenizer():
    """Ids that are no tokens are never allowed; a tokenizer's tokens beyond the model are not written."""
    size = byte_level().raw.get_vocab_size(with_added_tokens=True)
    for vocab, ends in ((size + 70, [1, 3]), (size, [2, size + 9]), (size - 40, [1])):
        words = np.full(-(-vocab // 32), -1, np.int32)
        guide = Grammars(byte_level(), vocab, ends).compiled(StructuredOutputs(choice=["ab"])).guide()
        guide.allow(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
        allowed = {byte_level().id_to_token(int(token)) for token in np.nonzero(bits)[0]}
        assert "a" in allowed and allowed <= {"a", "ab"}
        guide.take(byte_level().encode("a", add_special_tokens=False)[0])
        assert not guide.complete
        finished = Grammars(byte_level(), vocab, ends).compiled(StructuredOutputs(regex="a*")).guide()
        finished.allow(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
        assert set(np.nonzero(bits)[0]) & {0, 1, 2, 3, 4, 5} == {token for token in ends if token < vocab}
        with pytest.raises(RequestError, match="too complex"):
            guide.take(byte_level().encode("a", add_special_tokens=False)[0])
