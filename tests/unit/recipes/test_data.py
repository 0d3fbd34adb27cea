"""From files to rows: every kind of record, masks of the loss, packing, windows, Megatron's index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nxd_infer.context import make_context, use_context
from nxd_infer.errors import RecipeError
from nxd_infer.parallel_layers.loss_functions import parallel_cross_entropy
from nxd_infer.recipes.data.encode import Encoder, Example
from nxd_infer.recipes.data.megatron import IndexedFile, blend_of, split_of
from nxd_infer.recipes.data.rows import Blend, Packed, Pairs, Windows, one_each, pack
from nxd_infer.recipes.data.sources import records
from nxd_infer.recipes.data.store import TokenStore, write_store
from nxd_models import registry
from nxd_server.text.chat_template import ChatTemplate
from nxd_server.text.tokenizer import Tokenizer
from tests.support.recipes.indexed import write_indexed
from tests.support.tiny_models import BOS, EOS, VOCAB_SIZE, write_tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny("llama", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(model_dir) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"text": "a"}\n{"text"\n', "x.jsonl cannot be read: JSON parse error: .* in row 1"),
        ("x.jsonl", '{"text": "a"}\n7\n', "x.jsonl cannot be read: JSON parse error"),
        ("x.json", "[1", "x.json cannot be read"),
        ("x.jsonl", 'null\n{"text": "a"}\n', "begins with null, which is no record"),
        ("x.json", '[ null, {"text": "a"}]', "begins with null, which is no record"),
        ("x.bin", "", "is of no kind that is read"),
        ("none", None, "is not there"),
        ("", None, "has no file"),
    ],
)
def test_a_damaged_file_is_named_and_a_missing_one(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=message):
        list(records(tmp_path / name))


def counted(example: Example, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(
        [token for token, counts in zip(example.ids, example.counts, strict=True) if counts], skip_special_tokens=False
    )


def test_only_the_answer_counts(model_dir, tokenizer):
    encoder = Encoder(tokenizer, ChatTemplate.from_dir(model_dir))
    end = tokenizer.id_to_token(EOS) or ""
    for record in ({"prompt": "What? ", "completion": "That."}, {"input": "What? ", "output": "That."}):
        (found,) = encoder.examples(record, 0)
        assert tokenizer.decode(found.ids) == "What? That."
        assert counted(found, tokenizer) == "That." + end
    (whole,) = Encoder(tokenizer, mask_prompt=False).examples({"prompt": "What? ", "completion": "That."}, 0)
    assert all(whole.counts)
    (text,) = encoder.examples({"text": "Some text."}, 0)
    assert text.ids[-1] == EOS and all(text.counts)


def test_a_conversation_needs_a_template(tokenizer):
    with pytest.raises(RecipeError, match="no chat template"):
        list(Encoder(tokenizer).examples({"messages": [{"role": "assistant", "content": "one"}]}, 0))


def test_a_preference_is_two_examples_with_one_prompt(tokenizer):
    encoder = Encoder(tokenizer, length=12, prompt_length=3, pairs=True)
    chosen, rejected = encoder.examples({"prompt": "What is it? ", "chosen": "a thing", "rejected": "no"}, 0)
    start = chosen.counts.index(True)
    assert start == 3 == rejected.counts.index(True)
    assert chosen.ids[:3] == rejected.ids[:3] == tokenizer.encode("What is it? ")[:3]
    # The tokenizer joins the space at the end of the prompt to the answer, whose first token it therefore is.
    assert counted(rejected, tokenizer) == " no" + (tokenizer.id_to_token(EOS) or "")
    assert len(chosen.ids) <= 12
    record = {"prompt": "What is it? ", "chosen": "a", "rejected": "b"}
    late, _ = Encoder(tokenizer, prompt_length=3, keep_end=True, pairs=True).examples(record, 0)
    whole, _ = Encoder(tokenizer, pairs=True).examples(record, 0)
    start = whole.counts.index(True)
    assert start > 3 and late.ids == whole.ids[start - 3 :] and late.counts.index(True) == 3


def test_a_long_prompt_leaves_room_for_the_answer(tokenizer):
    """Else no token of it would count, and ORPO would divide by zero."""
    record = {"prompt": "What is it? " * 9, "chosen": "a thing", "rejected": "no"}
    for keep_end in (False, True):
        for found in Encoder(tokenizer, length=12, keep_end=keep_end, pairs=True).examples(record, 0):
            assert len(found.ids) == 12 and found.counts == [False] * 11 + [True]


def test_the_end_counts_whoever_adds_it(tokenizer):
    """A tokenizer that ends texts itself marks the end as special."""
    from tokenizers.processors import TemplateProcessing

    begin, end = (tokenizer.id_to_token(one) or "" for one in (BOS, EOS))
    raw = type(tokenizer.raw).from_str(tokenizer.raw.to_str())
    ends = TemplateProcessing(single=f"{begin} $A {end}", special_tokens=[(begin, BOS), (end, EOS)])
    raw.post_processor = ends
    record = {"prompt": "What? ", "completion": "That."}
    (expected,) = Encoder(tokenizer).examples(record, 0)
    (found,) = Encoder(Tokenizer(raw, tokenizer.config)).examples(record, 0)
    assert (list(found.ids), list(found.counts)) == (list(expected.ids), list(expected.counts))


def test_a_record_of_no_known_columns_is_shown():
    with pytest.raises(RecipeError, match="record 7 has the columns question, answer; known are input_ids; messages"):
        list(Encoder(None).examples({"question": "a", "answer": "b"}, 7))
    with pytest.raises(RecipeError, match=r"needs data\.tokenizer\.type"):
        list(Encoder(None).examples({"text": "a"}, 0))


def stored(folder, documents) -> TokenStore:
    write_store(folder, [Example(ids, [token % 2 == 0 for token in ids]) for ids in documents])
    return TokenStore(folder)


def test_packing_keeps_every_document_whole_and_wastes_little():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, 500)
    bins = pack(lengths, 256)
    assert sorted(number for one in bins for number in one) == list(range(500))
    assert all(sum(lengths[number] for number in one) <= 256 for one in bins)
    assert lengths.sum() / (len(bins) * 256) > 0.97
    assert pack([300, 10], 256) == [[0], [1]]  # a longer one is cut, and fills its row


def test_a_packed_row_keeps_labels_and_restarts_positions(tmp_path):
    store = stored(tmp_path / "s", [[2, 4, 5], [], [6, 7, 8, 10], [12] * 9])
    assert len(store) == 3  # the empty one is left out
    row = Packed(store, 8, [[0, 1], [2]], pad=99)[0]
    assert row["input_ids"].tolist() == [2, 4, 5, 6, 7, 8, 10, 99]
    assert row["labels"].tolist() == [-100, 4, -100, -100, -100, 8, 10, -100]  # odd ones do not count, nor first ones
    assert row["attention_mask"].tolist() == [1, 1, 1, 2, 2, 2, 2, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert Packed(store, 8, one_each(store))[2]["input_ids"].tolist() == [12] * 8


def test_windows_know_where_documents_begin(tmp_path):
    store = stored(tmp_path / "s", [[2, 4, 6], [8, 10], [12, 14, 16]])
    plain = Windows(store, 4)
    assert len(plain) == 2
    assert plain[1]["input_ids"].tolist() == plain[1]["labels"].tolist() == [10, 12, 14, 16]
    apart = Windows(store, 4, apart=True, restart=True)
    assert apart[0]["attention_mask"].tolist() == [1, 1, 1, 2]
    assert apart[0]["labels"].tolist() == [-100, 4, 6, -100]
    assert apart[0]["position_ids"].tolist() == [0, 1, 2, 0]
    assert apart[1]["attention_mask"].tolist() == [1, 2, 2, 2] and apart[1]["position_ids"].tolist() == [0, 0, 1, 2]
    assert Windows(store, 4, end=14)[1]["labels"].tolist() == [10, 12, -100, 16]
    assert len(Windows(store, 4, 1, 2)) == 0
    with pytest.raises(IndexError):
        plain[2]


def test_a_pair_is_two_rows(tmp_path):
    store = stored(tmp_path / "s", [[1, 2], [1, 4], [1, 6], [1, 8]])
    pairs = Pairs(store, 3)
    assert len(pairs) == 2
    assert pairs[1]["input_ids"].tolist() == [[1, 6, 0], [1, 8, 0]]
    assert pairs[1]["targets"].tolist() == [[-100, 6, -100], [-100, 8, -100]]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64])
def test_an_indexed_file_gives_its_documents_back(tmp_path, dtype):
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    write_indexed(tmp_path / "x", documents, dtype)
    found = IndexedFile(tmp_path / "x")
    assert found.ids.tolist() == list(range(1, 10)) and found.bounds.tolist() == [0, 3, 5, 9]
    assert Windows(found, 4)[1]["input_ids"].tolist() == [5, 6, 7, 8]


def test_a_damaged_index_is_an_error(tmp_path):
    write_indexed(tmp_path / "x", [[1, 2, 3], [4]])
    index = (tmp_path / "x.idx").read_bytes()
    for change, message in (
        (b"wrong" + index[5:], "is not an indexed file"),
        (index[:40], "was cut off"),
        (index[:17] + b"\x07" + index[18:], "dtype 7"),
        (index[:42] + b"\x09" + index[43:], "do not follow each other"),
    ):
        (tmp_path / "x.idx").write_bytes(change)
        with pytest.raises(RecipeError, match=message):
            IndexedFile(tmp_path / "x")
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(b"\x01")
    with pytest.raises(RecipeError, match="its index needs 16"):
        IndexedFile(tmp_path / "x")
    with pytest.raises(RecipeError, match="cannot be read"):
        IndexedFile(tmp_path / "y")


def test_blends_and_splits():
    assert blend_of([0.3, "a", "0.7", "b"], "") == [(0.3, "a"), (0.7, "b")]
    assert blend_of(["a", "b"], "") == [(1.0, "a"), (1.0, "b")]
    with pytest.raises(RecipeError):
        blend_of([0.3, "a", "b"], "r.yaml:1")
    assert [split_of("980,10,10", part, 1000, "") for part in range(3)] == [(0, 980), (980, 990), (990, 1000)]
    with pytest.raises(RecipeError, match="the nearest is 980,10,10"):
        split_of("a,b", 0, 10, "r.yaml:1")
    mixed = Blend([["a"] * 30, ["b"] * 100], [0.25, 0.75])  # type: ignore[list-item]
    assert [mixed[i] for i in range(8)].count("a") == 2 and len(mixed) == 120


LENGTH = 64


def per_token(model, row) -> torch.Tensor:
    """The loss of each label of a row, in order."""
    ids, labels = row["input_ids"][None], row["labels"][None]
    _, logits = model(ids, row["attention_mask"][None], labels, row["position_ids"][None])
    losses = parallel_cross_entropy(logits[:, :-1], labels[:, 1:])
    return losses[labels[:, 1:] != -100]


FAMILIES = ("llama", "qwen3", "gpt_neox")


def model_of(family: str, folder: Path) -> Any:
    if family != "gpt_neox":
        return registry.load_model(write_tiny(family, folder), "generate", torch.float32)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    raw = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "initializer_range": 0.3}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, **sizes, **text}))
    torch.manual_seed(0)
    return registry.build(folder, "generate", torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked_to_a_millionth_per_token(tmp_path, family):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 30, (12,), generator=generator).tolist()
    documents = [torch.randint(5, VOCAB_SIZE, (size,), generator=generator).tolist() for size in sizes]
    write_store(tmp_path / "s", [Example(ids, [place > 1 for place in range(len(ids))]) for ids in documents])
    store = TokenStore(tmp_path / "s")
    with use_context(make_context()):
        model = model_of(family, tmp_path / "m")
    bins = pack(store.lengths, LENGTH)
    assert len(bins) < 6
    alone = Packed(store, LENGTH, one_each(store))
    with torch.no_grad():
        for packed, members in zip(Packed(store, LENGTH, bins), bins, strict=True):
            expected = torch.cat([per_token(model, alone[number]) for number in members])
            found = per_token(model, packed)
            assert found.shape == expected.shape
            assert (found - expected).abs().max() <= 1e-6
            crossed = dict(packed, attention_mask=(packed["attention_mask"] != 0).long())
            assert (per_token(model, crossed) - expected).abs().max() > 1e-3  # the mask is what keeps them apart


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sum_over_microbatches_is_the_mean_over_all(tmp_path, family):
    model = model_of(family, tmp_path)
    ids = torch.randint(5, VOCAB_SIZE, (4, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = labels[2, 3:] = -100
    whole, _ = model(ids, labels=labels)
    items = (labels[:, 1:] != -100).sum()
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=items)[0] for i in range(4)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-6, atol=0)
