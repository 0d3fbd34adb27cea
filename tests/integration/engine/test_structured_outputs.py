"""Answers that follow a grammar: what a naive search in transformers' model gives, JSON that a validator accepts."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from nxd_server import LLM, SamplingParams
from nxd_server.engine.core.step_inputs import sampler_of
from nxd_server.errors import RequestError
from nxd_server.text.detokenize import byte_level_bytes
from nxd_server.text.grammars import Grammars
from nxd_server.text.structured_outputs import MOST_CHARACTERS, StructuredOutputs
from nxd_server.text.tokenizer import Tokenizer
from tests.support.engine.real_artifacts import costs_of, paying_costs
from tests.support.http.http_artifacts import trace_tiny

TOKENS = 200
CHOICES = ["yes", "yes, but", "no", "nö", "maybe 🤔", "maybe 🤗"]
FREE = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def slow_cores_may_take_longer(monkeypatch):
    monkeypatch.setattr("nxd_server.text.grammars.SECONDS", 60.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("structured")


@pytest.fixture(scope="module")
def artifact(root):
    return trace_tiny(
        "llama", "generate", root, tp=1, batch_sizes=[1, 4], prompt_buckets=[16], max_len=256, speculate=3
    )


@pytest.fixture(scope="module")
def llm(artifact):
    with LLM(artifact, costs=costs_of(artifact)) as llm:
        yield llm


@pytest.fixture(scope="module", params=["steps begun ahead", "guesses"])
def other(request, artifact):
    """The same model, whose steps hold tokens that are not known yet, or guesses."""
    guesses = {"speculate": 3, "costs": paying_costs(artifact)}
    options = guesses if request.param == "guesses" else {"in_process": False, "costs": costs_of(artifact)}
    with LLM(artifact, **options) as llm:
        assert llm.engine._batcher._steps.depth == (1 if request.param == "guesses" else 2)
        yield llm


def answers(llm, prompts, **params):
    """The texts and the reasons for their end."""
    params = SamplingParams(**{"max_tokens": TOKENS, "temperature": 0, **params})
    return [(one.text, one.finish_reason) for output in llm.generate(prompts, params) for one in output.outputs]


def searched(model, tokenizer, prompt, choices, ends):
    """The likeliest next token, again and again, of all that lead to one of ``choices``: tried one by one."""
    ids, said = tokenizer.encode(prompt), b""
    pieces = [_bytes(tokenizer, token) for token in range(tokenizer.vocab_size)]
    while True:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        wanted = [choice.encode() for choice in choices]
        allowed = [
            token
            for token, piece in enumerate(pieces)
            if (piece and any(one.startswith(said + piece) for one in wanted)) or (token in ends and said in wanted)
        ]
        best = max(allowed, key=lambda token: float(logits[token]))
        if best in ends:
            return said.decode()
        ids.append(best)
        said += pieces[best]
        if all(one == said or not one.startswith(said) for one in wanted):
            return said.decode()


def _bytes(tokenizer, token):
    """What a token of a byte-level tokenizer stands for; nothing for a special one."""
    text = tokenizer.id_to_token(token)
    return b"" if text is None or token in tokenizer.special_ids else byte_level_bytes(text)


@pytest.mark.parametrize("prompt", ["the", "for 3", "import os", "x = [", "class A"])
def test_a_choice_is_the_one_that_a_naive_search_finds(llm, root, prompt):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32).eval()
    want = searched(model, llm.tokenizer, prompt, CHOICES, llm.engine.eos_token_ids)
    assert answers(llm, prompt, structured_outputs={"choice": CHOICES}) == [(want, "stop")]


def schemas():
    """JSON schemas of finite depth."""
    texts = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=6)
    leaves = st.one_of(
        st.builds(
            lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
            st.integers(-99, 99),
            st.integers(0, 500),
        ),
        st.lists(st.one_of(texts, st.booleans(), st.none(), st.integers(-9, 9)), min_size=1, max_size=3).map(
            lambda some: {"enum": some}
        ),
        texts.map(lambda text: {"const": text}),
        st.builds(
            lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
            st.integers(0, 3),
            st.integers(0, 5),
        ),
        st.sampled_from(["boolean", "null"]).map(lambda kind: {"type": kind}),
        st.sampled_from(["[a-c]+[0-9]{2}", "^x{1,4}$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 8}
        ),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(
                lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)
            ),
            st.builds(
                lambda named, needed: {
                    "type": "object",
                    "properties": named,
                    "required": [name for name, need in zip(named, needed, strict=False) if need],
                    "additionalProperties": False,
                },
                st.dictionaries(st.sampled_from(["a", "b c", 'd"', "é"]), inner, max_size=2),
                st.lists(st.booleans(), min_size=2, max_size=2),
            ),
            st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}),
        ),
        max_leaves=4,
    )


@settings(max_examples=40)
@given(schema=schemas(), seed=st.integers(0, 999))
def test_json_of_any_schema_is_accepted_by_a_validator(llm, schema, seed):
    found = answers(
        llm, ["a"] * 2, temperature=1.0, seed=seed, max_tokens=240, structured_outputs={"json": schema}, n=2
    )
    for text, reason in found:
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
        else:
            assert reason == "length"
    assert any(reason == "stop" for _, reason in found)


def balanced(text):
    return re.fullmatch(r"\(+\)+", text) and text.count("(") == text.count(")")


PLATE, FEW = "[a-f]{3,9}-[0-9]{2}", {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 3}
FORMS = {
    "json": (FEW, lambda text: isinstance(json.loads(text), list)),
    "json_object": (True, lambda text: isinstance(json.loads(text), dict)),
    "regex": (PLATE, lambda text: re.fullmatch(PLATE, text)),
    "choice": (CHOICES, lambda text: text in CHOICES),
    "grammar": ('start: "(" [start] ")"', balanced),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_kept_to_at_any_temperature(llm, form):
    asked, right = FORMS[form]
    for temperature in (0, 1.5):
        found = answers(
            llm, "if", temperature=temperature, seed=4, n=4 if temperature else 1, structured_outputs={form: asked}
        )
        assert all(right(text) for text, reason in found if reason == "stop"), found
        assert {reason for _, reason in found} <= {"stop", "length"}
    assert any(reason == "stop" for _, reason in found)


def test_llama_cpps_notation_of_grammars(llm):
    asked = {"grammar": 'root ::= word (" " word)*\nword ::= "ab" | "cd"'}
    text, _ = answers(llm, "if", structured_outputs=asked, max_tokens=12)[0]
    assert re.fullmatch(r"((ab|cd) )*(a|ab|c|cd)?", text)


def test_answers_are_the_same_in_any_company_and_however_steps_are_run(llm, other):
    """Free and bound answers in one batch, steps begun ahead of known tokens, guesses that are verified."""
    greedy = SamplingParams(max_tokens=60, temperature=0)
    bound = [
        greedy.replace(structured_outputs={"json": FEW}),
        greedy.replace(temperature=1, seed=3, structured_outputs={"regex": "(abc|abd|abe){9,20}"}),
        greedy.replace(structured_outputs={"choice": CHOICES}),
    ]
    asked = [
        ("the the the", FREE.replace(logit_bias={40: 99})),
        ("for", bound[0]),
        ("abc abd abc abd", bound[1]),
        ("the the", FREE),
        ("if", bound[2]),
        ("x", FREE),
    ]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in asked]
    for _ in range(2):
        together = other.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        assert [output.outputs[0].token_ids for output in together] == alone
    assert (other.engine.stats().accepted_tokens > 0) == other.engine._batcher._speculation.active


def test_a_slot_that_a_bound_answer_leaves_binds_nobody(llm):
    free = llm.generate("the", FREE)[0].outputs[0].token_ids
    for _ in range(3):
        answers(llm, ["a"] * 4, structured_outputs={"choice": ["yes", "no"]})
        assert [output.outputs[0].token_ids for output in llm.generate(["the"] * 4, FREE)] == [free] * 4


def test_how_an_answer_ends(llm):
    digits = {"regex": "[0-9]{4}"}
    assert [reason for _, reason in answers(llm, "if", structured_outputs=digits)] == ["stop"]
    (cut,) = answers(llm, "if", structured_outputs={"regex": "[0-9]{40}"}, max_tokens=3)
    assert cut[1] == "length" and re.fullmatch("[0-9]{1,40}", cut[0])
    (stopped,) = answers(llm, "if", structured_outputs={"choice": ["one END two"]}, stop=["END"])
    assert stopped == ("one ", "stop")
    # A grammar's end goes before what would go on, and its own may come late where it may.
    for more in ({"min_tokens": 100}, {"ignore_eos": True}):
        assert answers(llm, "if", structured_outputs={"choice": ["yes"]}, **more) == [("yes", "stop")]
    (late,) = answers(llm, "if", structured_outputs={"regex": "[ab]*"}, min_tokens=30, temperature=1, seed=1)
    assert re.fullmatch("[ab]*", late[0]) and len(late[0]) >= 30


def test_logit_bias_chooses_among_what_is_allowed(llm):
    (yes,) = llm.tokenizer.encode("y", add_special_tokens=False)
    for bias, want in ((100, "y"), (-100, "n")):
        asked = {"structured_outputs": {"choice": ["y", "n"]}, "logit_bias": {yes: bias}}
        assert answers(llm, "if", **asked)[0][0] == want


WRONG = [
    ({}, "structured_outputs", "exactly one"),
    ({"json": {}, "regex": "a"}, "structured_outputs", "json and regex"),
    ({"schema": {}}, "structured_outputs", "'schema'"),
    ([1], "structured_outputs", "must be an object"),
    ({"json": 3}, "structured_outputs.json", "a JSON schema"),
    ({"json": "[1"}, "structured_outputs.json", "an object, or its text"),
    ({"json": {"not": {}}}, "structured_outputs.json", '"not"'),
    ({"json": {"enum": []}}, "structured_outputs.json", "Unsatisfiable"),
    ({"json_object": False}, "structured_outputs.json_object", "must be true"),
    ({"regex": "(a"}, "structured_outputs.regex", "unclosed group"),
    ({"regex": "a\\"}, "structured_outputs.regex", "ends with a backslash"),
    ({"regex": "(?=a)b"}, "structured_outputs.regex", "look-ahead"),
    ({"regex": "x" * (MOST_CHARACTERS + 1)}, "structured_outputs.regex", "at most"),
    ({"regex": 3}, "structured_outputs.regex", "a string"),
    ({"choice": []}, "structured_outputs.choice", "one or more"),
    ({"choice": "yes"}, "structured_outputs.choice", "a list"),
    ({"grammar": "start: nothing"}, "structured_outputs.grammar", '"nothing"'),
]


@pytest.mark.parametrize(("asked", "field", "why"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_constraint_is_refused_before_anything_runs(llm, asked, field, why):
    steps = sum(llm.engine.stats().bucket_steps.values())
    with pytest.raises(RequestError, match=re.escape(why)) as raised:
        answers(llm, "if", structured_outputs=asked)
    assert raised.value.field == field
    assert sum(llm.engine.stats().bucket_steps.values()) == steps


def rules(count, of):
    return "\n".join(of.format(number=number, next=number + 1) for number in range(count))


HOSTILE = {
    "ambiguous": "start: s\ns: " + " | ".join(f"s s t{number}" for number in range(60)) + " | A\nA: /[a-z]{1,3}/\n"
    + rules(60, "t{number}: A?"),
    "a chain of rules": rules(4000, "a{number}: a{next}").replace("a0:", "start:") + '\na4000: "x"',
    "a chain of tokens": "start: A0\n" + rules(4000, "A{number}: A{next}") + '\nA4000: "x"',
    "its notation": 'root ::= "a" b0\n' + rules(3000, 'b{number} ::= "a" b{next}') + '\nb3000 ::= "x"',
}  # fmt: skip


@pytest.mark.parametrize("grammar", HOSTILE)
def test_a_hostile_grammar_costs_little_and_fails_its_own_answer_alone(llm, grammar):
    """Of 1 to 60 kB: without limits they ended the process, or took seconds for each token."""
    assert len(HOSTILE[grammar]) < MOST_CHARACTERS
    params = SamplingParams(max_tokens=TOKENS, temperature=0, structured_outputs={"grammar": HOSTILE[grammar]})
    try:
        llm.generate("if", params)
        assert grammar != "ambiguous"
    except RequestError as error:
        assert "too complex" in str(error) and len(str(error)) < 700
    assert answers(llm, "if", structured_outputs={"choice": ["yes"]}) == [("yes", "stop")]


def test_a_hostile_schema_costs_little(llm):
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(1500)} | {"a1500": {"type": "null"}}
    assert answers(llm, "if", structured_outputs={"json": {"$ref": "#/$defs/a0", "$defs": chain}}) == [("null", "stop")]
    optional = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(1500)}}
    with pytest.raises(RequestError, match=r"^structured_outputs: the grammar is too complex"):
        answers(llm, "if", structured_outputs={"json": optional})


def test_many_choices_and_special_names_in_them(llm):
    many = [f"choice {number}" for number in range(3000)]
    assert answers(llm, "if", structured_outputs={"choice": many})[0][0] in many
    # The text of a special token's name, which no special token stands for; and what is special in other notations.
    for text in ("<|user|>", "<|end|>x", "%llguidance", 'a"b\\c/d\n', "[a-z]+", "$^.*", "日本🤗"):
        assert answers(llm, "if", structured_outputs={"choice": [text]}) == [(text, "stop")]
        assert json.loads(answers(llm, "if", structured_outputs={"json": {"const": text}})[0][0]) == text
    for grammar in ('root ::= "<|user|>"', 'start: "<|user|>"', '%llguidance {"no_forcing": true}\nstart: "<|user|>"'):
        assert answers(llm, "if", structured_outputs={"grammar": grammar}) == [("<|user|>", "stop")]


def test_what_cannot_follow_a_grammar_says_so(llm):
    asked = StructuredOutputs(choice=["a"])
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(RequestError, match="names no token that ends an answer"):
        Grammars(llm.tokenizer, llm.engine.vocab_size, []).compiled(asked)
    with pytest.raises(RequestError, match=r"^structured_outputs: structured outputs need a tokenizer of bytes"):
        Grammars(Tokenizer(wordpiece), 2, [0]).compiled(asked)
    inputs = {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
    }
    params = SamplingParams(structured_outputs=asked)
    with pytest.raises(RequestError, match="no input 'allowed', so structured_outputs cannot act"):
        sampler_of(params, 1, inputs, 100, 0, ())
    tokenizer, llm.engine._grammars = llm.engine._grammars, None
    try:
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate("if", params)
    finally:
        llm.engine._grammars = tokenizer


def test_masks_of_models_with_more_or_fewer_tokens_than_the_tokenizer(llm):
    """Ids that are no tokens are never allowed; a tokenizer's tokens beyond the model are not written."""
    size = llm.tokenizer.raw.get_vocab_size(with_added_tokens=True)
    for vocab, ends in ((size + 70, [1, 3]), (size, [2, size + 9]), (size - 40, [1])):
        words = np.full(-(-vocab // 32), -1, np.int32)
        guide = Grammars(llm.tokenizer, vocab, ends).compiled(StructuredOutputs(choice=["ab"])).guide()
        guide.allow(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
        allowed = {llm.tokenizer.id_to_token(int(token)) for token in np.nonzero(bits)[0]}
        assert "a" in allowed and allowed <= {"a", "ab"}
        guide.take(llm.tokenizer.encode("a", add_special_tokens=False)[0])
        assert not guide.complete
        finished = Grammars(llm.tokenizer, vocab, ends).compiled(StructuredOutputs(regex="a*")).guide()
        finished.allow(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
        assert set(np.nonzero(bits)[0]) & {0, 1, 2, 3, 4, 5} == {token for token in ends if token < vocab}
        with pytest.raises(RequestError, match="too complex"):
            guide.take(llm.tokenizer.encode("a", add_special_tokens=False)[0])


def test_compiled_grammars_are_kept_and_not_shared(llm):
    grammars = Grammars(llm.tokenizer, llm.engine.vocab_size, llm.engine.eos_token_ids)
    found = grammars.compiled(StructuredOutputs(regex="ab*"))
    assert grammars.compiled(StructuredOutputs(regex="ab*")) is found
    (letter,) = llm.tokenizer.encode("a", add_special_tokens=False)
    for guide in (found.guide(), found.guide()):
        guide.take(letter)
    for number in range(100):
        grammars.compiled(StructuredOutputs(regex=f"c{number}"))
    assert len(grammars._compiled) == 64
    assert grammars.compiled(StructuredOutputs(regex="ab*")) is not found


def test_an_answer_whose_masks_take_too_long_is_ended_alone(llm, monkeypatch):
    """Before its step begins: what other slots hold for later prompts stays."""
    asked, prompt = {"regex": "new{3}"}, "the statement that begins a long text of many words"
    answers(llm, "if", structured_outputs=asked)
    short = FREE.replace(max_tokens=4)
    llm.generate(prompt, short)
    monkeypatch.setattr("nxd_server.text.grammars.SECONDS", 0.0)
    with pytest.raises(RequestError, match=r"^structured_outputs: the grammar is too complex: it takes too long"):
        answers(llm, "if", structured_outputs=asked)
    assert llm.generate(prompt, short)[0].usage.cached_tokens > 0
