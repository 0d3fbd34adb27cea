"""What a recipe is made of: its text, the records of its data, and indexed files of Megatron's."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.convert import as_yaml, convert
from nxd_infer.recipes.data.encode import Encoder, Example
from nxd_infer.recipes.data.megatron import IndexedFile
from nxd_infer.recipes.data.rows import Documents, Packed, Windows, pack
from nxd_infer.recipes.data.sources import records
from nxd_infer.recipes.data.store import TokenStore, write_store
from nxd_infer.recipes.models import obstacles
from nxd_infer.recipes.prepare import checked_examples
from nxd_infer.recipes.recipe import check, load
from nxd_infer.recipes.yaml_text import read_yaml
from nxd_server.text.chat_template import ChatTemplate
from nxd_server.text.tokenizer import Tokenizer
from tests.fuzz.mutations import BYTES, LINES, YAML, joined, parted
from tests.fuzz.target import Target
from tests.support.e2e.command import ROOT
from tests.support.recipes.indexed import write_indexed
from tests.support.tiny_models import VOCAB_SIZE, write_tiny

RECIPE = """name: small
trainer: {devices: 2, max_steps: 1e2, max_time: "00:01:00:00", val_check_interval: 0.5}
exp_manager: {name: "${name}", exp_dir: ~/x, checkpoint_callback_params: {filename: "{step}-{val_loss:.2f}"}}
distributed_strategy: {tensor_model_parallel_size: 2, zero1: true}
data: {train_dir: "${stdlib:this.py}", global_batch_size: "${multiply:2, ${.micro_batch_size}}", micro_batch_size: 2}
model: &model
  {num_layers: 2, hidden_size: 32, num_attention_heads: 4, optim: {lr: 3e-4, betas: [0.9, 0.95], sched: {min_lr: 1e-5}}}
model_alignment_strategy: {sft: {packing: true}, peft: {target_modules: [q_proj]}}
trace: {out: "${oc.env:HOME,/tmp}/x", max_len: 64}
"""


def recipe(place: Path) -> Target:
    """A recipe's text, read as a recipe and as a configuration to convert; what is printed of it is YAML again."""
    file, printed = place / "recipe.yaml", place / "printed.yaml"
    (place / "llama3_8b").symlink_to(ROOT / "examples/recipes/llama3_8b")  # which the first of these names
    others = (ROOT / "examples/recipes/llama3_8b.yaml", ROOT / "tests/support/recipes/megatron.yaml")
    made = [RECIPE, *(other.read_text() for other in others)]

    def read(data: bytes) -> None:
        file.write_bytes(data)
        printed.write_text(as_yaml(*convert(read_yaml(file))))
        read_yaml(printed)
        loaded = load(file, ["model.optim.lr=1e-3"])
        assert loaded.recipe.model.optim.lr == 1e-3
        obstacles(loaded)
        again = check(read_yaml(file))
        assert again.recipe.trainer == loaded.recipe.trainer

    return Target("recipe", read, (RecipeError,), [text.encode() for text in made], YAML)


RECORDS = (
    {"text": "A text, with an é."},
    {"prompt": "What? ", "completion": "That."},
    {"input": "What? ", "output": "That."},
    {"prompt": "What? ", "chosen": "yes", "rejected": "no"},
    {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "one"}]},
    {"prompt": [{"role": "user", "content": "a?"}], "completion": [{"role": "assistant", "content": "one"}]},
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
)


def jsonl(place: Path) -> Target:
    """Records, a line each, and as one list: to tokens, to a store, to packed rows; every document comes back."""
    model = write_tiny("llama", place / "model")
    tokenizer, template = Tokenizer.from_dir(model), ChatTemplate.from_dir(model)
    encoders = [
        Encoder(tokenizer, template, length=24),
        Encoder(tokenizer, template, mask_prompt=False, prompt_length=3, length=12, keep_end=True),
    ]
    lines, whole = place / "data.jsonl", place / "data.json"

    def read(data: bytes) -> None:
        lines.write_bytes(data)
        found = list(records(lines))
        whole.write_text(json.dumps(found, default=str))
        assert len(list(records(whole))) == len(found)
        for encoder in encoders:
            examples: list[Example] = list(checked_examples(encoder, iter(found), VOCAB_SIZE))
            write_store(place / "store", examples)
            store = TokenStore(place / "store")
            kept = [list(example.ids) for example in examples if len(example.ids)]
            assert tokens(store) == kept
            rows = Packed(store, 24, pack(store.lengths, 24))
            placed = sum(int((rows[number]["attention_mask"] != 0).sum()) for number in range(len(rows)))
            assert placed == sum(len(ids) for ids in kept)

    made = [json.dumps(record).encode() for record in RECORDS if "chosen" not in record]  # which SFT refuses
    return Target("jsonl", read, (RecipeError,), [*made, b"\n".join(made)], LINES)


def tokens(documents: Documents) -> list[list[int]]:
    return [documents.ids[low:high].tolist() for low, high in itertools.pairwise(documents.bounds)]


def megatron(place: Path) -> Target:
    """An index and its tokens; what was accepted can be cut into rows, and written again."""
    write_indexed(place / "made", [[1, 2, 3], [4, 5], [6, 7, 8, 9]], np.uint16)
    made = joined((place / "made.idx").read_bytes(), (place / "made.bin").read_bytes())

    def read(data: bytes) -> None:
        for name, part in zip(("idx", "bin"), parted(data), strict=True):
            (place / f"x.{name}").write_bytes(part)
        found = IndexedFile(place / "x")
        rows = Windows(found, 3, apart=True, restart=True, vocabulary=VOCAB_SIZE)
        for number in range(len(rows)):
            row = rows[number]
            assert int(row["input_ids"].min()) >= 0 and int(row["position_ids"].min()) == 0
        write_indexed(place / "again", tokens(found), found.ids.dtype.type)
        assert tokens(IndexedFile(place / "again")) == tokens(found)

    return Target("megatron", read, (RecipeError,), [made], BYTES)
