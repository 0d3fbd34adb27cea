"""Tokenizers from their files: the same ids as transformers gives, limits never applied silently."""

from __future__ import annotations

import json

import pytest

from nxd_infer.errors import ModelConfigError
from nxd_server.errors import PromptTooLongError, RequestError, TextTooLongError
from nxd_server.text.tokenizer import LONG_TEXT, SHORT_ENOUGH, LibraryPanic, Tokenizer
from tests.support import tiny_models
from tests.support.text.text_tokenizers import KINDS, byte_level, read_canonical, wordpiece

SENTENCES = ["Hello, World! Don't stop.", "naïve café 你好 😀", "", "  spaces   and\ttabs\n", "<|end|> in the text"]


@pytest.mark.parametrize("family", ["llama", "bert", "roberta"])
def test_ids_and_text_equal_those_of_transformers(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    directory = tiny_models.write_tiny(family, tmp_path / family)
    ours, theirs = Tokenizer.from_dir(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for text in SENTENCES:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.bos_token_id == theirs.bos_token_id and ours.eos_token_id == theirs.eos_token_id
    assert ours.special_ids == frozenset(theirs.all_special_ids) | ours.special_ids


def test_a_truncation_in_the_file_is_not_applied_silently(tmp_path):
    raw = type(byte_level().raw).from_str(byte_level().raw.to_str())
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_dir(tmp_path).encode("one two three four five", add_special_tokens=False)) > 4


@pytest.mark.parametrize("kind", [None, "BertTokenizer", "PreTrainedTokenizerFast", "PreTrainedTokenizer"])
@pytest.mark.parametrize("names", [None, ["input_ids"], ["input_ids", "token_type_ids"]])
def test_the_type_of_a_second_text_is_that_of_transformers(tmp_path, kind, names):
    transformers = pytest.importorskip("transformers", "5")
    wordpiece().raw.save(str(tmp_path / "tokenizer.json"))
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    second = {"Sequence": {"id": "B", "type_id": 1}}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, second]
    raw["post_processor"] = {"type": "TemplateProcessing", "single": pair[:1], "pair": pair, "special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    config = {"tokenizer_class": kind, "model_input_names": names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    wanted = transformers.AutoTokenizer.from_pretrained(tmp_path)("the quick fox", "the dog")
    ids, types = read_canonical(tmp_path).encode_with_types("the quick fox", "the dog")
    assert ids == wanted["input_ids"] and types == wanted.get("token_type_ids", [0] * len(ids))


def damaged(**parts):
    return json.dumps(json.loads(byte_level().raw.to_str()) | parts)


# The library would go through all ids between, and end the process where memory does.
GAP = {"type": "WordLevel", "vocab": {"a": 0, "b": 4_000_000_000}, "unk_token": "a"}
# It panics; sentencepiece models without normalization were converted to such a map.
EMPTY_MAP = {"type": "Precompiled", "precompiled_charsmap": ""}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{}", r"no tokenizer\.json"),
        ("tokenizer.json", "{}", r"tokenizer\.json"),
        ("tokenizer.json", "not json", r"tokenizer\.json"),
        ("tokenizer.json", damaged(added_tokens=[], model=GAP), "its 2 tokens have ids up to 4000000000"),
        ("tokenizer.json", damaged(normalizer=EMPTY_MAP), r"tokenizer\.json.*precompiled_charsmap"),
    ],
)
def test_what_is_no_readable_tokenizer_is_refused_by_name(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelConfigError, match=words):
        Tokenizer.from_dir(tmp_path)


def test_a_text_or_ids_on_which_the_library_panics_are_an_error_of_their_own(tmp_path):
    decoder = {"type": "Strip", "content": "q", "start": 1, "stop": 1}
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AQAAAA=="}
    (tmp_path / "tokenizer.json").write_text(damaged(normalizer=normalizer, decoder=decoder))
    tokenizer = Tokenizer.from_dir(tmp_path)
    with pytest.raises(RequestError, match=r"prompt\[1\].*index out of bounds"):
        tokenizer.encode("quick", field="prompt[1]")
    ids = [tokenizer.token_to_id(token) for token in ("a", "q")]
    assert tokenizer.decode(ids[:1]) == "a"
    with pytest.raises(LibraryPanic, match="slice index"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00 ok", 3, b"bytes"])
def test_what_is_no_text_is_a_request_error_that_names_the_field(text):
    with pytest.raises(RequestError, match=r"surrogate|string") as caught:
        byte_level().encode(text, field="prompt[2]")
    assert caught.value.field == "prompt[2]"


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_join_to_the_text(kind):
    tokenizer = KINDS[kind]()
    if kind == "wordpiece":
        assert tokenizer.token_text(tokenizer.token_to_id("[CLS]")) == "[CLS]"
        return
    text = "go 你好 😀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode().lstrip() == text
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_the_same_tokens_by_the_fast_call(special):
    tokenizer = byte_level()
    text = "def f(x): return é 中 😀\n" * 400
    assert len(text) > LONG_TEXT
    ids = tokenizer.raw.encode(text, add_special_tokens=special).ids
    assert tokenizer.encode(text, add_special_tokens=special) == ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pair", "most"), [(None, 90), ("one two", None), ("one two " * 600, 90), (None, 10**6)])
def test_a_long_text_or_pair_is_for_an_encoder_what_the_slow_call_makes_of_it(kind, pair, most):
    tokenizer, text = KINDS[kind](), "def f(x): return 12\n" * 400
    ids, types = tokenizer.encode_with_types(text, pair, most=most)
    whole = tokenizer.raw.encode(text, pair)
    if most == 90:
        assert len(ids) == 90 and set(types) == set(whole.type_ids)
    else:
        assert (ids, types) == (whole.ids, whole.type_ids)
        with pytest.raises(PromptTooLongError, match=f"the text has {len(ids)} tokens.* is 90 tokens"):
            tokenizer.encode_with_types(text, pair, most=most, limit=90)


def test_a_text_that_cannot_fit_is_refused_unread_and_one_that_might_is_not():
    tokenizer = wordpiece()
    tokenizer.check_length("a" * SHORT_ENOUGH, 4)
    with pytest.raises(TextTooLongError, match=f"{SHORT_ENOUGH + 1} characters.*4 tokens"):
        tokenizer.check_length("a" * (SHORT_ENOUGH + 1), 4)
    tokenizer.check_length("a" * (SHORT_ENOUGH + 1), SHORT_ENOUGH + 1)


PAIRS = [("a short one", "Hello, World! Don't stop. " * 3), ("Hello, World! " * 4, "short"), ("one two three", "four")]


def test_a_cut_text_or_pair_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    directory = tiny_models.write_tiny("bert", tmp_path)
    ours, theirs = Tokenizer.from_dir(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for most in (3, 4, 9, 10, 500):
        for text, pair in [(text, None) for text in SENTENCES] + PAIRS:
            expected = theirs(text, pair, truncation=True, max_length=most)["input_ids"]
            assert ours.encode_with_types(text, pair, most=most)[0] == expected, (most, text, pair)
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens: 2 has no room beside 2 special .* at least 3"):
        ours.encode_with_types("a", most=2)
    whole = ours.encode_with_types("a", "b")
    assert ours.encode_with_types("a", "b", most=50) == whole  # with the types of both
