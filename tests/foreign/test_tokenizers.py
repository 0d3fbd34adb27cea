"""Tokenizers that people bring: the ids that transformers' AutoTokenizer gives, or a refusal by name."""

from __future__ import annotations

import importlib.util
import json
import shutil
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto import tokenization_auto as auto

from nxd_infer.errors import MissingPackageError, ModelConfigError
from nxd_infer.hugging_face.tokenizer import canonical_files, has_tokenizer
from nxd_server.text.tokenizer import Tokenizer
from tests.support.foreign.tokenizers import SPECIAL, built, sentencepiece_model, texts, write_files
from tests.support.text.text_tokenizers import byte_level, read_canonical, wordpiece

TEXTS = texts()
MODEL_TYPES: dict[str, str] = {}
for _type, _name in auto.TOKENIZER_MAPPING_NAMES.items():
    if isinstance(_name, str):  # before transformers 5, a pair
        MODEL_TYPES.setdefault(_name, _type)
READ = {
    *("AlbertTokenizer", "BartTokenizer", "BertTokenizer", "BigBirdTokenizer", "BlenderbotTokenizer", "CLIPTokenizer"),
    *("CohereTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer", "FunnelTokenizer", "GPT2Tokenizer"),
    *("GPTNeoXTokenizer", "GemmaTokenizer", "HerbertTokenizer", "LlamaTokenizer", "MBartTokenizer", "MPNetTokenizer"),
    *("NllbTokenizer", "OpenAIGPTTokenizer", "PegasusTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer"),
    *("ReformerTokenizer", "RemBertTokenizer", "RobertaTokenizer", "T5Tokenizer", "TokenizersBackend"),
    *("WhisperTokenizer", "XGLMTokenizer", "XLMRobertaTokenizer", "XLNetTokenizer"),
}
"""Classes that must be read; of any other it is enough to be refused."""
WITH_FILES = {
    "BertTokenizer",
    "CLIPTokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "Qwen2Tokenizer",
    "RobertaTokenizer",
}
if importlib.util.find_spec("sentencepiece"):
    WITH_FILES |= {"LlamaTokenizer", "T5Tokenizer", "XLMRobertaTokenizer", "DebertaV2Tokenizer", "NllbTokenizer"}


def outcome(directory: Path) -> str:
    """``equal``, ``refused`` by a text that names the class, ``none``, or what differs from AutoTokenizer's."""
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    try:
        if not has_tokenizer(directory):
            return "none"
        ours = read_canonical(directory)
    except ModelConfigError as error:
        assert str(directory) in str(error) and type(theirs).__name__ in str(error)
        return "refused"
    for given, special in ((TEXTS, True), (TEXTS[:50], False)):
        expected = theirs(given, add_special_tokens=special)["input_ids"]
        found = [one.ids for one in ours.raw.encode_batch(given, add_special_tokens=special)]
        wrong = [pair for pair in zip(given, found, expected, strict=True) if pair[1] != pair[2]]
        if wrong:
            return f"{len(wrong)} of {len(given)} texts differ, such as {wrong[0]}"
    if (directory / "config.json").is_file():  # as beside the model that a recipe leaves
        shutil.copyfile(directory / "config.json", directory / "canonical/config.json")
    again = transformers.AutoTokenizer.from_pretrained(directory / "canonical")
    same = again(TEXTS[:50])["input_ids"] == theirs(TEXTS[:50])["input_ids"]
    return "equal" if same and again.special_tokens_map == theirs.special_tokens_map else "read again, it differs"


def saved(name: str, folder: Path) -> list[str]:
    """What comes of the directories that tokenizers of a class have saved."""
    found = []
    for number, made in enumerate(built(auto.tokenizer_class_from_name(name))):
        if not isinstance(made, Exception):
            made.save_pretrained(folder / str(number))
            (folder / str(number) / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[name]}))
            found.append(outcome(folder / str(number)))
    return found


def files_alone(name: str, folder: Path) -> list[str]:
    """What comes of a slow tokenizer's files: vocabulary and merges, or a model of sentencepiece."""
    try:
        folder.mkdir()
        written = write_files(auto.tokenizer_class_from_name(name), folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        size = len(transformers.AutoTokenizer.from_pretrained(folder)) if written else 0
    except Exception:  # it wants other files, or a package that is not here
        return []
    return [outcome(folder)] if size > 100 else []


@pytest.mark.parametrize("form", [saved, files_alone])
def test_every_class_has_the_ids_of_transformers_or_is_refused(form, tmp_path):
    outcomes: dict[str, list[str]] = {}
    for name in MODEL_TYPES:
        try:
            outcomes[name] = form(name, tmp_path / name)
        except ImportError:  # of a package that this class needs
            outcomes[name] = []
    wrong = {name: found for name, found in outcomes.items() if {*found} - {"equal", "refused", "none"}}
    assert not wrong
    read = {name for name, found in outcomes.items() if "equal" in found}
    wanted = READ if form is saved else WITH_FILES
    assert wanted & MODEL_TYPES.keys() <= read, {name: outcomes[name] for name in wanted & outcomes.keys() - read}


# --- kinds that came out wrong, with the right values ---------------------------------------------------------


def write_merges(directory: Path, **settings: Any) -> Tokenizer:
    """Write GPT-2's files and these settings; return the tokenizer without special tokens, for comparison."""
    byte_level().raw.model.save(str(directory))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **settings}))
    return byte_level()


def test_opt_begins_with_its_begin_token(tmp_path):
    plain = write_merges(tmp_path, add_bos_token=True, bos_token="</s>", eos_token="</s>", unk_token="</s>")
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    ids = plain.encode("quick 你好", add_special_tokens=False)
    ours = read_canonical(tmp_path)
    assert ours.encode("quick 你好") == [plain.token_to_id("</s>"), *ids]
    assert ours.encode("quick 你好", add_special_tokens=False) == ids
    assert ours.bos_token_id == ours.eos_token_id == plain.token_to_id("</s>")


@pytest.mark.parametrize("lower", [True, False])
def test_the_configuration_says_whether_bert_lowers(tmp_path, lower):
    wordpiece().raw.save(str(tmp_path / "tokenizer.json"))  # which lowers
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = read_canonical(tmp_path)
    unknown, fox = ours.token_to_id("[UNK]"), ours.encode("fox", add_special_tokens=False)
    assert ours.encode("FOX", add_special_tokens=False) == (fox if lower else [unknown])


def test_tokens_of_the_configuration_alone_are_one_id_each(tmp_path):
    byte_level().raw.save(str(tmp_path / "tokenizer.json"))
    size = byte_level().vocab_size
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    added = {
        str(size): {"content": "<|tool|>", **flags},
        str(size + 1): {"content": "<plain>", **flags, "special": False},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = read_canonical(tmp_path)
    assert ours.encode("<|tool|><plain>", add_special_tokens=False) == [size, size + 1]
    assert ours.decode([size, size + 1]) == "<plain>" and size in ours.special_ids


@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_in_a_text_are_tokens_unless_the_configuration_splits_them(tmp_path, split):
    byte_level().raw.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": split}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert (len(read_canonical(tmp_path).encode("</s>", add_special_tokens=False)) > 1) == split


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_cut_on_the_side_that_the_configuration_says(tmp_path, side):
    wordpiece().raw.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "truncation_side": side}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), read_canonical(tmp_path)
    for pair in (None, "the dog"):
        expected = theirs("the quick fox", pair, truncation=True, max_length=5)
        assert ours.encode_with_types("the quick fox", pair, most=5)[0] == expected["input_ids"]


def test_berts_vocabulary_alone_has_its_markers_and_types(tmp_path):
    vocabulary = sorted(wordpiece().raw.get_vocab().items(), key=lambda item: item[1])
    (tmp_path / "vocab.txt").write_text("\n".join(token for token, _ in vocabulary))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    ours = read_canonical(tmp_path)
    cls, sep = (ours.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    first, second = (wordpiece().encode(text, add_special_tokens=False) for text in ("the quick fox", "the dog"))
    ids, types = ours.encode_with_types("the quick fox", "the dog")
    assert ids == [cls, *first, sep, *second, sep]
    assert types == [0] * (len(first) + 2) + [1] * (len(second) + 1)


def test_a_model_of_sentencepiece_is_read_or_the_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sentencepiece" else name)
    with pytest.raises(MissingPackageError, match=r"sentencepiece is not installed: pip install 'nxd-infer\[hf\]'"):
        canonical_files(tmp_path)
    monkeypatch.undo()
    if importlib.util.find_spec("sentencepiece") is not None:
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model("bpe"))
        assert outcome(tmp_path) == "equal"


def test_mistrals_own_file_is_read(tmp_path):
    pieces = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" t", b" the"]
    special = ["<unk>", "<s>", "</s>", *(f"[{number}]" for number in range(7))]
    vocabulary = [{"rank": rank, "token_bytes": b64encode(one).decode()} for rank, one in enumerate(pieces)]
    config = {"pattern": r" ?\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+", "version": "v3", "num_vocab_tokens": len(pieces)}
    config |= {"default_vocab_size": len(pieces) + 10, "default_num_special_tokens": 10}
    tokens = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)]
    tekken = {"config": config, "vocab": vocabulary, "special_tokens": tokens}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert outcome(tmp_path) == "equal"
    assert read_canonical(tmp_path).encode("the é", add_special_tokens=False)[0] == 10 + pieces.index(b"the")


OWN_CODE = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"vocab.json": "{}"}, "cannot read its tokenizer"),
        ({"tokenizer.json": "{}"}, "cannot read its tokenizer"),
        ({"vocab.json": '{"a": 0}', "config.json": '{"model_type": "gemma"}'}, "GemmaTokenizer reads tokenizer.json"),
        ({"tokenizer.json": "own", "tokenizer_config.json": json.dumps(OWN_CODE)}, "trust_remote_code"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_fix(tmp_path, files, words):
    for name, content in files.items():
        (tmp_path / name).write_text(byte_level().raw.to_str() if content == "own" else content)
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(ModelConfigError, match=words) as caught:
        canonical_files(tmp_path)
    assert str(tmp_path) in str(caught.value) and "save_pretrained" in str(caught.value)


def test_a_tokenizer_written_in_python_that_the_library_has_no_equal_of_is_refused(tmp_path):
    words = [*SPECIAL, "a", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    with pytest.raises(ModelConfigError, match="its EsmTokenizer has no"):
        canonical_files(tmp_path)
