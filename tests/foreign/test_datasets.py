"""Data as trl and datasets define it: tokens and masks are those of trl's trainers, or a record is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
import transformers
import trl

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.data.encode import Encoder
from nxd_infer.recipes.data.sources import records
from nxd_server.text.chat_template import ChatTemplate
from nxd_server.text.tokenizer import Tokenizer
from tests.support.tiny_models import write_tiny

Rows = list[dict[str, Any]]

HEAD = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% if messages[0].role != 'system' %}<|user|>Be kind.<|end|>{% endif %}"
    "{% if shout %}LOUD{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>"
)
SAID = (
    "{{ message.content }}{% for call in message.tool_calls or [] %}[{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}]{% endfor %}<|end|>"
)
TAIL = (
    "{% else %}<|user|>{{ message.role }}: {{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED, MARKED = HEAD + SAID + TAIL, HEAD + "{% generation %}" + SAID + "{% endgeneration %}" + TAIL
"""A template with a default system prompt, tools, and a variable; the second says what the assistant's is."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("model"))


def with_template(folder: Path, template: str):
    """Transformers' tokenizer with a template, and what encodes records here with the same one."""
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    reference.chat_template = template
    special = {"bos_token": reference.bos_token or "", "eos_token": reference.eos_token}

    def encoder(**options: Any) -> Encoder:
        return Encoder(Tokenizer.from_dir(folder), ChatTemplate(template, special), **options)

    return reference, encoder


def encoded(encoder: Encoder, rows: Sequence[Any]) -> list[tuple[list[int], list[bool]]]:
    """Tokens, and which of them count."""
    found = [one for number, row in enumerate(rows) for one in encoder.examples(row, number)]
    return [(list(one.ids), list(map(bool, one.counts))) for one in found]


def by_trl(folder: Path, tokenizer: Any, rows: Rows, tmp_path: Path, kind: str = "SFT", **options: Any) -> Any:
    """A trainer of trl's whose data are these rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    plain = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_length": None}
    config = getattr(trl, f"{kind}Config")(output_dir=str(tmp_path), **plain, **options)
    data = datasets.Dataset.from_list(rows)
    return getattr(trl, f"{kind}Trainer")(model=model, args=config, train_dataset=data, processing_class=tokenizer)


USER, ASSISTANT, SYSTEM = ({"role": role, "content": f"I am the {role}."} for role in ("user", "assistant", "system"))
OTHER = {"role": "assistant", "content": "No, I am."}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}},
]}  # fmt: skip
RESULT = {"role": "tool", "name": "add", "content": "3"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}]  # fmt: skip
AGENT = [SYSTEM, USER, CALL, RESULT, ASSISTANT]

LEARNT: dict[str, Rows] = {
    "text": [{"text": "The sky is blue."}, {"text": "é 🙂<|end|>"}],
    "messages": [{"messages": [USER, ASSISTANT]}, {"messages": [SYSTEM, USER, ASSISTANT, USER, OTHER]}],
    "assistant_first": [{"messages": [ASSISTANT, USER, OTHER]}, {"messages": [OTHER]}],
    "tools": [{"messages": AGENT, "tools": TOOLS}],
    "tools_as_text": [{"messages": AGENT, "tools": json.dumps(TOOLS)}],
    "variables": [{"messages": [USER, ASSISTANT], "chat_template_kwargs": {"shout": True}}],
    "prompt_completion": [{"prompt": "The sky", "completion": " is blue."}, {"prompt": "a ", "completion": "b"},
                          {"prompt": " is", "completion": "er"}],  # whose tokens are others, of the prompt too
    "prompt_completion_messages": [{"prompt": [USER], "completion": [ASSISTANT]},
                                   {"prompt": [USER, OTHER, USER], "completion": [ASSISTANT]}],
    "prompt_completion_tools": [{"prompt": [USER], "completion": [CALL, RESULT, ASSISTANT], "tools": TOOLS}],
}  # fmt: skip
"""Of trl's types: what SFT learns."""


@pytest.mark.parametrize("template", [UNMARKED, MARKED], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", LEARNT)
def test_what_is_learnt_is_what_trl_learns(folder, tmp_path, name, template):
    """Without marks in the template, too: trl, which then needs some, gets the one that has them."""
    rows = LEARNT[name]
    reference, _ = with_template(folder, MARKED)
    _, encoder = with_template(folder, template)
    talks = not isinstance(next(iter(rows[0].values())), str)
    expected = by_trl(folder, reference, rows, tmp_path, assistant_only_loss=talks).train_dataset
    counts = [[label != -100 for label in labels] for labels in expected["labels"]]
    assert encoded(encoder(), rows) == list(zip(expected["input_ids"], counts, strict=True))


PREFERRED: dict[str, Rows] = {
    "explicit": [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
                 {"prompt": "The sky ", "chosen": "is", "rejected": "was"}],  # merges the space in one answer
    "implicit": [{"chosen": "The sky is blue.", "rejected": "The sky is green."}],
    "explicit_messages": [{"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]}],
    "implicit_messages": [{"chosen": [SYSTEM, USER, ASSISTANT], "rejected": [SYSTEM, USER, OTHER]}],
    "equal": [{"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}],
    "equal_texts": [{"chosen": "The sky", "rejected": "The sky"}],
    "tools": [{"prompt": [USER], "chosen": [CALL], "rejected": [OTHER], "tools": TOOLS}],
    "variables": [{"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER],
                   "chat_template_kwargs": {"shout": True}}],
}  # fmt: skip


@pytest.mark.parametrize("template", [UNMARKED, MARKED], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", PREFERRED)
def test_what_is_preferred_is_what_trl_prefers(folder, tmp_path, name, template):
    rows = PREFERRED[name]
    reference, encoder = with_template(folder, template)
    expected = []
    for row in by_trl(folder, reference, rows, tmp_path, "DPO").train_dataset:
        for answer in ("chosen_ids", "rejected_ids"):
            counts = [False] * len(row["prompt_ids"]) + [True] * len(row[answer])
            expected.append((row["prompt_ids"] + row[answer], counts))
    assert encoded(encoder(pairs=True), rows) == expected


PUBLIC: dict[str, tuple[Rows, Rows]] = {
    "sharegpt": (
        [{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                            {"from": "gpt", "value": "a"}]}],
        [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                       {"role": "assistant", "content": "a"}]}],
    ),
    "conversations": ([{"conversations": [USER, ASSISTANT]}], [{"messages": [USER, ASSISTANT]}]),
    "system": (
        [{"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
         {"system": "", "conversations": [USER, ASSISTANT]}],
        [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                       {"role": "assistant", "content": "a"}]}, {"messages": [USER, ASSISTANT]}],
    ),
    "no tools": ([{"messages": [USER, ASSISTANT], "tools": ""}], [{"messages": [USER, ASSISTANT], "tools": None}]),
    "alpaca": (
        [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Sing.", "input": "", "output": "La"}],
        [{"messages": [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]},
         {"messages": [{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "La"}]}],
    ),
    "alpaca_without_input": (
        [{"instruction": "Sing.", "output": "La"}],
        [{"messages": [{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "La"}]}],
    ),
    "input_output": ([{"input": "q ", "output": "a"}], [{"prompt": "q ", "completion": "a"}]),
    "arguments_as_text": (
        [{"messages": [USER, {**CALL, "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}]}]}],
        [{"messages": [USER, CALL]}],
    ),
    "parts": ([{"messages": [{"role": "user", "content": [{"type": "text", "text": "I am the user."}]}, ASSISTANT]}],
              [{"messages": [USER, ASSISTANT]}]),
    "empty_columns": ([{"messages": [USER, ASSISTANT], "tools": None, "text": None}],
                      [{"messages": [USER, ASSISTANT]}]),
    "no_tools": ([{"messages": [USER, ASSISTANT], "tools": []}], [{"messages": [USER, ASSISTANT]}]),
}  # fmt: skip
"""Other forms that are common, and what they stand for in trl's."""


@pytest.mark.parametrize("template", [UNMARKED, MARKED], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_forms_are_what_they_stand_for(folder, name, template):
    rows, meaning = PUBLIC[name]
    _, encoder = with_template(folder, template)
    assert encoded(encoder(), rows) == encoded(encoder(), meaning)


def test_alpaca_without_a_chat_template_has_the_prompt_of_its_authors(folder):
    encoder = Encoder(Tokenizer.from_dir(folder))
    ((ids, counts),) = encoded(encoder, [{"instruction": "Add.", "input": "1 2", "output": "3"}])
    text = Tokenizer.from_dir(folder).decode(ids)
    assert "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3" in text
    assert counts[-3:] == [False, True, True]


def test_tokens_are_learnt_where_no_column_beside_them_says_otherwise():
    ids = [5, 6, 7, 8]
    rows = [
        {"input_ids": ids, "attention_mask": [1] * 4},
        {"input_ids": ids, "labels": [-100, 6, 7, 8], "completion_mask": [0, 0, 1, 1]},
        {"input_ids": ids, "completion_mask": [0, 0, 1, 1], "assistant_masks": [1, 1, 1, 0]},
    ]
    counts = [counts for _, counts in encoded(Encoder(None), rows)]
    assert counts == [[True] * 4, [False, False, True, True], [False, False, True, False]]


REFUSED = [
    ({"prompt": "q"}, {}, "record 0 has the columns prompt; known are"),
    ({"prompt": [USER]}, {}, "record 0 has the columns prompt; known are"),
    ({"prompt": "q", "completion": "a", "label": True}, {}, "is an unpaired preference \\(label\\)"),
    ({"prompt": "q", "completions": ["a"], "labels": [True]}, {}, "has the columns prompt, completions, labels; known"),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, {}, "is a preference, which needs dpo or orpo"),
    ({"chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}, {}, "is a preference, which needs dpo or orpo"),
    ({"messages": [USER, ASSISTANT]}, {"pairs": True}, "is no preference"),
    ({"prompt": "q", "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}, {"pairs": True},
     "a prompt that is a text, and answers that are messages"),
    ({"prompt": [USER], "chosen": [USER, ASSISTANT], "rejected": [USER, OTHER]}, {"pairs": True},
     r"has its prompt in both answers again: leave it out by data.ignore_columns=\[prompt\]"),
    ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": []}, {"pairs": True}, "rejected has no token that counts"),
    ({"messages": [USER, ASSISTANT], "source": "x", "id": 1}, {}, r"has source, id beside messages.*columns=\[so"),
    ({"messages": [USER, ASSISTANT], "images": ["x"]}, {}, "has images beside messages"),
    ({"messages": [USER, ASSISTANT], "text": "x"}, {}, "has text beside messages"),
    ({"instruction": "i", "context": "c", "output": "o"}, {}, "has context beside instruction and output"),
    ({"instruction": "i", "output": "o", "history": [["a", "b"]]}, {}, "has history beside instruction and output"),
    ({"prompt": "q", "completion": "a", "tools": TOOLS}, {}, "has tools, but its prompt and answer are no lists"),
    ({"system": "s", "conversations": [SYSTEM, USER, ASSISTANT]}, {}, "a column system, and a first message that is"),
    ({"conversations": [{"from": "observation", "value": "x"}]}, {}, "a message is from 'observation'; known are"),
    ({"conversations": [{"from": "gpt", "value": "x", "weight": 0}]}, {}, "has weight, which the tokenizer's"),
    ({"messages": [USER, {**ASSISTANT, "reasoning_content": "hm"}]}, {}, "has reasoning_content, which the"),
    ({"messages": [USER, ASSISTANT], "tools": "[{"}, {}, "tools is not JSON"),
    ({"messages": [USER, ASSISTANT], "tools": [1]}, {}, "tools must be a list of objects"),
    ({"messages": [USER, ASSISTANT], "chat_template_kwargs": {"unknown": 1}}, {}, "has unknown, which the tokenizer's"),
    ({"messages": [USER, ASSISTANT], "chat_template_kwargs": {"messages": []}}, {}, "must be an object without"),
    ({"messages": "hello"}, {}, "messages must be a list of messages"),
    ({"messages": []}, {}, "messages"),
    ({"text": 3}, {}, "must be a string, got int"),
    ({"input_ids": [1, 2], "attention_mask": [1, 0]}, {}, "has padding"),
    ({"input_ids": [1, 2], "labels": [2, 3]}, {}, "labels are not shifted"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "options", "told"), REFUSED)
def test_what_would_be_misread_is_refused_by_name(folder, row, options, told):
    _, encoder = with_template(folder, UNMARKED)
    with pytest.raises(RecipeError, match=told):
        encoded(encoder(**options), [row])


def test_columns_can_be_left_out(folder):
    _, encoder = with_template(folder, UNMARKED)
    row = {"messages": [USER, {**ASSISTANT, "weight": 1}], "source": "x"}
    left_out = encoder(ignore=["source", "messages.weight"])
    assert encoded(left_out, [row]) == encoded(encoder(), [{"messages": [USER, ASSISTANT]}])
    row = {"prompt": [USER], "completion": [{**ASSISTANT, "weight": 1}]}
    assert encoded(left_out, [row]) == encoded(encoder(), [{"messages": [USER, ASSISTANT]}])


# --- templates of real models ---------------------------------------------------------------------------------

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TALK = [USER, ASSISTANT, USER, OTHER]
REASONED = [USER, {**ASSISTANT, "content": "<think>\nhm\n</think>\n\nYes."}, USER, {**OTHER, "reasoning_content": "so"}]
REAL = [
    ("qwen3", TALK), ("qwen3", REASONED), ("qwen2_5", TALK), ("qwen2_5", [USER, CALL, RESULT, ASSISTANT]),
    ("llama3", TALK), ("llama3", [ASSISTANT, USER, OTHER]), ("gemma", TALK), ("phi3", TALK), ("cohere", TALK),
    ("deepseekv3", TALK), ("glm4moe", TALK), ("gptoss", TALK), ("lfm2", TALK), ("qwen3_instruct_2507", TALK),
    ("qwen3_5_think", TALK), ("deepseek_r1_distill", TALK),
]  # fmt: skip


@pytest.mark.parametrize(("name", "talk"), REAL)
def test_marks_are_those_of_transformers(folder, name, talk):
    reference, encoder = with_template(folder, (TEMPLATES / f"{name}_training.jinja").read_text())
    expected = reference.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    masks = [bool(one) for one in expected["assistant_masks"]]
    assert any(masks) and encoded(encoder(), [{"messages": talk}]) == [(expected["input_ids"], masks)]


def said(folder: Path, template: str, talk: Rows, **variables: Any) -> list[str]:
    """The texts of a conversation that count."""
    reference, encoder = with_template(folder, template)
    row = {"messages": talk, **({"chat_template_kwargs": variables} if variables else {})}
    ((ids, counts),) = encoded(encoder(), [row])
    text, texts = reference.decode(ids), []
    assert text == reference.apply_chat_template(talk, tokenize=False, **variables)
    for place, (token, count) in enumerate(zip(ids, counts, strict=True)):
        if count and (place == 0 or not counts[place - 1]):
            texts.append([])
        if count:
            texts[-1].append(token)
    return [reference.decode(one) for one in texts]


@pytest.mark.parametrize(
    ("name", "talk", "expected"),
    [
        ("llama3", TALK, ["I am the assistant.<|eot_id|>", "No, I am.<|eot_id|>"]),
        ("llama3", [ASSISTANT, USER, OTHER], ["I am the assistant.<|eot_id|>", "No, I am.<|eot_id|>"]),
        ("gemma", TALK, ["I am the assistant.<end_of_turn>\n", "No, I am.<end_of_turn>\n"]),
        ("phi3", TALK, ["I am the assistant.<|end|>\n", "No, I am.<|end|>\n<|end|>"]),  # the end of the text, too
        ("qwen2_5", TALK, ["I am the assistant.<|im_end|>\n", "No, I am.<|im_end|>\n"]),  # with a default system prompt
        ("qwen2_5", [ASSISTANT, USER, OTHER], ["I am the assistant.<|im_end|>\n", "No, I am.<|im_end|>\n"]),
        ("qwen2_5", [USER, CALL, RESULT, ASSISTANT],
         ['<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call><|im_end|>\n',
          "I am the assistant.<|im_end|>\n"]),
        ("qwen3", TALK, ["I am the assistant.<|im_end|>\n", "<think>\n\n</think>\n\nNo, I am.<|im_end|>\n"]),
        ("qwen3", REASONED, ["Yes.<|im_end|>\n", "<think>\nso\n</think>\n\nNo, I am.<|im_end|>\n"]),
        ("qwen3", [ASSISTANT, USER, OTHER],
         ["I am the assistant.<|im_end|>\n", "<think>\n\n</think>\n\nNo, I am.<|im_end|>\n"]),
        ("qwen3_6", TALK, ["I am the assistant.<|im_end|>\n", "\n</think>\n\nNo, I am.<|im_end|>\n"]),
        ("qwen3_6", [ASSISTANT, USER, OTHER],
         ["I am the assistant.<|im_end|>\n", "\n</think>\n\nNo, I am.<|im_end|>\n"]),
        ("qwen3_5_nothink", TALK, ["I am the assistant.<|im_end|>\n", "No, I am.<|im_end|>\n"]),
        ("nemotron_3_nano", REASONED, ["</think>\n\nYes.<|im_end|>\n", "so\n</think>\nNo, I am.<|im_end|>\n"]),
        ("deepseek_r1_distill", TALK, ["I am the assistant.<｜end▁of▁sentence｜>", "No, I am.<｜end▁of▁sentence｜>"]),
        ("deepseek_r1_distill", REASONED[:2], ["\n\nYes.<｜end▁of▁sentence｜>"]),
        ("gptoss", TALK,  # which ends the last answer in another way
         ["<|channel|>final<|message|>I am the assistant.<|end|>", "<|channel|>final<|message|>No, I am.<|return|>"]),
    ],
)  # fmt: skip
def test_without_marks_what_the_assistant_says_counts(folder, name, talk, expected):
    """Also in an earlier answer, which is written without its reasoning, and where the prompt opens <think>."""
    assert said(folder, (TEMPLATES / f"{name}.jinja").read_text(), talk) == expected


def test_a_template_that_rewrites_what_came_before_is_refused(folder):
    forgetful = "{% for m in messages[-2:] %}{{ m.role }}: {{ m.content }}{% endfor %}"
    _, encoder = with_template(folder, forgetful)
    with pytest.raises(RecipeError, match="record 0: the chat template writes a conversation in another way"):
        encoded(encoder(), [{"messages": TALK}])


def test_an_answer_whose_end_is_not_certain_is_refused(folder):
    _, encoder = with_template(folder, (TEMPLATES / "deepseek_r1_distill.jinja").read_text())  # ends calls otherwise
    with pytest.raises(RecipeError, match="record 0: the chat template writes a conversation in another way"):
        encoded(encoder(), [{"messages": [USER, CALL, RESULT, ASSISTANT]}])


# --- files ------------------------------------------------------------------------------------------------------

PLAIN: Rows = [{"prompt": "The sky", "completion": " is blue."}, {"prompt": "2", "completion": "NA"}]
AGENTS: Rows = [{"messages": AGENT, "tools": TOOLS}, {"messages": [USER, ASSISTANT], "tools": TOOLS}]
AGENTS += json.loads(json.dumps(AGENTS).replace('"a"', '"c"').replace('"b"', '"d"'))


def as_arrow(rows: Rows, path: Path) -> Path:
    """The file that ``datasets`` itself keeps."""
    datasets.Dataset.from_list(rows).save_to_disk(str(path.with_suffix("")))
    return next(path.with_suffix("").glob("*.arrow"))


def as_saved(rows: Rows, path: Path) -> Path:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(path))
    return path


def lines(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def by_datasets(name: str):
    def write(rows: Rows, path: Path) -> Path:
        getattr(datasets.Dataset.from_list(rows), f"to_{name}")(str(path))
        return path

    return write


def by_pandas(name: str, **options: Any):
    def write(rows: Rows, path: Path) -> Path:
        getattr(pd.DataFrame(rows), f"to_{name}")(path, **options)
        return path

    return write


FILES = [
    ("x.jsonl", lambda rows, path: path.write_text(lines(rows)) and path),
    ("x.json", lambda rows, path: path.write_text(json.dumps(rows)) and path),
    ("x.json", by_datasets("json")),
    ("x.json", by_pandas("json", orient="records")),
    ("x.jsonl.gz", by_pandas("json", orient="records", lines=True)),
    ("x.jsonl.bz2", by_pandas("json", orient="records", lines=True)),
    ("x.jsonl.xz", by_pandas("json", orient="records", lines=True)),
    ("x.csv", by_datasets("csv")),
    ("x.csv.gz", by_pandas("csv", index=False)),
    ("x.tsv", by_pandas("csv", index=False, sep="\t")),
    ("x.parquet", by_datasets("parquet")),
    ("x.parquet", by_pandas("parquet")),
    ("x.arrow", as_arrow),
    ("saved", as_saved),
    ("odd [1]*.jsonl", lambda rows, path: path.write_text(lines(rows)) and path),
]


@pytest.mark.parametrize(("name", "write"), FILES, ids=[f"{n}-{name}" for n, (name, _) in enumerate(FILES)])
def test_a_file_of_every_kind_has_the_same_records(tmp_path, name, write):
    (tmp_path / "in [2]").mkdir()
    assert [dict(one) for one in records(write(PLAIN, tmp_path / "in [2]" / name))] == PLAIN


@pytest.mark.parametrize("name", ["jsonl", "json", "parquet", "arrow", "saved"])
def test_tools_come_through_a_file_as_they_were(folder, tmp_path, name):
    """Although they have other parameters, and calls other arguments, in other records."""
    write = {
        "jsonl": FILES[0][1],
        "json": lambda rows, path: path.write_text(json.dumps(rows)) and path,
        "parquet": lambda rows, path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path) or path,
        "arrow": as_arrow,
        "saved": as_saved,
    }[name]
    _, encoder = with_template(folder, UNMARKED)
    found = list(records(write(AGENTS, tmp_path / f"x.{name}")))
    assert encoded(encoder(), found) == encoded(encoder(), AGENTS)


def repository(folder: Path, config: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(f"---\nlicense: mit\n{config}---\n# About the data\n")
    for split in ("train", "test"):
        datasets.Dataset.from_list([{"text": split}]).to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return folder


def test_a_repository_has_splits(tmp_path):
    path = repository(tmp_path / "repo")
    assert list(records(path)) == [{"text": "train"}]
    assert list(records(path, "test")) == [{"text": "test"}]
    with pytest.raises(RecipeError, match=r"no split 'dev'; there are train, test: choose one by data.train_split"):
        list(records(path, "dev"))
    with pytest.raises(RecipeError, match=r"several splits, but not validation; there are train, test: .*val_split"):
        list(records(path, usual="validation"))
    saved = tmp_path / "saved"
    datasets.DatasetDict({name: datasets.Dataset.from_list([{"text": name}]) for name in ("test", "dev")}).save_to_disk(
        str(saved)
    )
    assert list(records(saved, "dev")) == [{"text": "dev"}]
    with pytest.raises(RecipeError, match="several splits, but not train; there are test, dev"):
        list(records(saved))


def test_a_readme_names_configurations(tmp_path):
    configs = "configs:\n" + "".join(f"- config_name: {n}\n  data_files: {n}-*.parquet\n" for n in ("train", "test"))
    path = repository(tmp_path / "repo", configs)
    assert list(records(path, subset="test")) == [{"text": "test"}]
    with pytest.raises(RecipeError, match=r"Please pick one among the available configs: \['train', 'test'\]"):
        list(records(path))


def test_a_file_that_would_not_be_read_is_named(tmp_path):
    path = repository(tmp_path / "repo")
    (path / "more.jsonl").write_text('{"text": "more"}\n')
    with pytest.raises(RecipeError, match=r"more.jsonl would not be read"):
        list(records(path))


def test_texts_of_a_folder_are_a_record_each(tmp_path):
    for name in ("1.txt", "2.md"):
        (tmp_path / name).write_text(f"{name}\n\nand more\n")
    assert list(records(tmp_path)) == [{"text": "1.txt\n\nand more\n"}, {"text": "2.md\n\nand more\n"}]


def test_names_of_texts_say_a_split_as_those_of_other_files_do(tmp_path):
    for name in ("train.txt", "test.txt", "README.txt"):
        (tmp_path / name).write_text(name)
    with pytest.raises(RecipeError, match=r"that of .*README.txt does not"):
        list(records(tmp_path))
    (tmp_path / "README.txt").unlink()
    assert list(records(tmp_path)) == [{"text": "train.txt"}]
    assert list(records(tmp_path, "test")) == [{"text": "test.txt"}]


@pytest.mark.parametrize("name", ["x.jsonl.zst", "x.jsonl.lz4"])
def test_what_reads_a_compressed_file_is_named_if_it_is_not_there(tmp_path, name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / name).write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(RecipeError, match=r"pip install (zstandard|lz4)"):
        list(records(tmp_path / name))
