"""Chat templates that people bring: the prompt of apply_chat_template, the same wherever it is rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
import trl

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.tokenizer import canonical_files
from nxd_infer.recipes.data.encode import Encoder
from nxd_server import LLM, SamplingParams
from nxd_server.errors import RequestError
from nxd_server.http.openai.chat import check_messages
from nxd_server.text.chat_template import ChatTemplate, TemplateSources
from nxd_server.text.template_process import BoundedTemplate
from nxd_server.text.tokenizer import Tokenizer
from tests.support.foreign.templates import (
    ANSWER,
    ARGUMENTS,
    CALL,
    CHATML,
    DOCUMENTS,
    HERMES,
    MISTRAL,
    PARTS,
    QWEN_3,
    RESULT,
    TALKS,
    TEMPLATES,
    TOOLS,
    USER,
)
from tests.support.text.text_tokenizers import read_canonical
from tests.support.tiny_models import write_tiny

VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"tools": TOOLS},
    {"documents": DOCUMENTS},
    {"enable_thinking": False, "date_string": "1 Jan 2030", "bos_token": "<other>"},
)


@pytest.fixture
def model(tmp_path) -> Path:
    return write_tiny("llama", tmp_path / "model", template="", max_position_embeddings=2048)


def canonical(model: Path, template: str) -> ChatTemplate:
    (model / "chat_template.jinja").write_text(template)
    read_canonical(model)
    found = ChatTemplate.from_dir(model / "canonical")
    assert found is not None
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_that_of_transformers_or_both_refuse(model, name):
    ours = canonical(model, TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    rendered = 0
    for talk in TALKS.values():
        if name == "parts":  # transformers has these templates see parts alone
            talk = [as_parts(message) for message in talk]
        for variables in VARIABLES:
            for prompted in (True, False):
                options = {"add_generation_prompt": prompted, **variables}
                try:
                    expected = theirs.apply_chat_template(talk, tokenize=False, **options)
                except Exception:
                    with pytest.raises(RequestError):
                        ours.render(talk, **options)
                else:
                    assert ours.render(talk, **options) == expected
                    rendered += 1
    assert rendered >= 8


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"] or ""}]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_parts_of_text_are_both_in_the_prompt(model, name):
    ours = canonical(model, TEMPLATES[name])
    options = {"tools": TOOLS if name == "hermes" else None}
    plain, parts = ours.render([USER], **options), ours.render([as_parts(USER)], **options)
    assert plain == parts and USER["content"] in plain


@pytest.mark.parametrize(
    ("name", "role"), [("gemma3", "system"), ("gemma4_v3", "system"), ("llava_next", "assistant"), ("glm4moe", "tool")]
)
def test_all_parts_of_a_role_that_takes_one_text_are_in_the_prompt(model, name, role):
    ours = canonical(model, (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text())
    said = {"role": role, "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    before = {"system": [], "assistant": [USER], "tool": [USER, CALL]}[role]
    assert "one\ntwo" in ours.render([*before, said, USER])


@pytest.mark.parametrize("name", ["hermes", "qwen 3", "llama 3", "mistral"])
def test_arguments_of_calls_may_be_text(model, name):
    ours = canonical(model, TEMPLATES[name])
    (call,) = CALL["tool_calls"]
    text = {**CALL, "tool_calls": [{**call, "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}]}
    prompts = [ours.render([USER, one, RESULT], tools=TOOLS) for one in (CALL, text)]
    assert prompts[0] == prompts[1] and json.dumps(ARGUMENTS, ensure_ascii=False) in prompts[0]


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_a_template_that_takes_arguments_as_text_gets_text(model, name):
    """Also where it writes a call only if the content is null, which transformers leaves out."""
    ours = canonical(model, (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text())
    (call,) = CALL["tool_calls"]
    text = json.dumps(ARGUMENTS, indent=1)
    prompts = []
    for content in (None, ""):
        for given in (text, ARGUMENTS):
            calls = [{**call, "function": {"name": "weather", "arguments": given}}]
            prompts.append(ours.render([USER, {**CALL, "content": content, "tool_calls": calls}, RESULT]))
    assert prompts[:2] == prompts[2:] and text in prompts[0]
    assert prompts[1] == prompts[0].replace(text, json.dumps(ARGUMENTS, ensure_ascii=False))
    if name == "deepseekv3":
        calls = [{**call, "function": {"name": "weather", "arguments": text}}]
        theirs = transformers.AutoTokenizer.from_pretrained(model)
        talk = [USER, {**CALL, "content": "", "tool_calls": calls}, RESULT]
        assert prompts[0] == theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)


MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}",
)


def test_marks_are_the_mask_of_transformers(model):
    ours = canonical(model, MARKED)
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer = Tokenizer.from_dir(model / "canonical")
    talk = [USER, ANSWER, USER, {**ANSWER, "content": "你好 é"}]
    expected = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    (found,) = Encoder(tokenizer, ours).examples({"messages": talk}, 0)
    assert list(found.ids) == expected["input_ids"]
    assert list(found.counts) == [bool(mark) for mark in expected["assistant_masks"]]


TALK = [USER, {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "call_1"}]}, {**RESULT, "tool_call_id": "call_1"}]


@pytest.mark.parametrize(
    "source", [QWEN_3, HERMES, MISTRAL, PARTS, MARKED], ids=["qwen", "hermes", "mistral", "parts", "marked"]
)
def test_a_conversation_is_the_same_in_serving_training_preferences_and_llm(model, source, monkeypatch):
    shown = {"tools": TOOLS} if source in (QWEN_3, HERMES, MISTRAL) else {}
    talk = [*TALK, ANSWER] if shown else [as_parts(USER), ANSWER]
    template, tokenizer = canonical(model, source), Tokenizer.from_dir(model / "canonical")
    sources = TemplateSources.from_dir(model / "canonical")
    assert sources is not None
    prompt = template.render(talk[:-1], **shown)
    # The server renders what its request's check has left, in another process.
    bounded = BoundedTemplate(sources, seconds=60, queue=1)
    try:
        served = bounded.render_here(check_messages(talk[:-1], "hermes"), shown, 10**6)
    finally:
        bounded.stop()
    # LLM, without ranks: what it would generate for.
    llm = object.__new__(LLM)
    llm.chat_template, llm.tokenizer = template, tokenizer
    monkeypatch.setattr(llm, "_default", lambda ids: None)
    monkeypatch.setattr(llm, "_answer", lambda texts, ids, *_: (texts, ids))
    ((text,), (ids,)) = llm.chat(talk[:-1], **shown)
    # Training renders the answers, too; what precedes them is the prompt.
    (learnt,) = Encoder(tokenizer, template, mask_prompt=False).examples({"messages": talk, **shown}, 0)
    record = {"prompt": talk[:-1], "chosen": talk[-1:], "rejected": talk[-1:], **shown}
    preferred, _ = Encoder(tokenizer, template, pairs=True).examples(record, 0)
    expected = tokenizer.encode(prompt, add_special_tokens=False)
    assert served == text == prompt and ids == expected
    assert list(learnt.ids) == list(preferred.ids)
    whole = tokenizer.decode(list(learnt.ids), skip_special_tokens=False)
    assert whole == template.render(talk, add_generation_prompt=False, **shown)


@pytest.mark.parametrize(
    "wrong", [{"tools": TOOLS}, {"sampling_params": SamplingParams()}, {"chat_template_kwargs": {"a": 1}}]
)
def test_llm_refuses_what_the_template_does_not_read(model, wrong):
    llm = object.__new__(LLM)
    llm.chat_template = canonical(model, CHATML)
    with pytest.raises(RequestError, match=f"{next(iter(wrong))}: the model's chat template reads no such variable"):
        llm.chat([USER], **wrong)


# --- where templates come from --------------------------------------------------------------------------------


def test_templates_by_name_and_the_file_before_the_configuration(model, tmp_path):
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    files = canonical_files(model)
    assert files["chat_template.jinja"] == b"plain"
    assert files["additional_chat_templates/tool_use.jinja"] == b"with tools"
    assert canonical_files(model, chat_template="tool_use")["chat_template.jinja"] == b"with tools"
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/rag.jinja").write_text("with documents")
    (model / "chat_template.jinja").write_text("of the file")
    files = canonical_files(model)
    assert files["chat_template.jinja"] == b"of the file"
    assert files["additional_chat_templates/rag.jinja"] == b"with documents"
    (tmp_path / "own.jinja").write_text("own")
    assert canonical_files(model, chat_template=str(tmp_path / "own.jinja"))["chat_template.jinja"] == b"own"
    with pytest.raises(ModelConfigError, match=r"chat_template = 'none' is no template that can be read, nor the name"):
        canonical_files(model, chat_template="none")
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ModelConfigError, match=r"\['rag'\], but none is the default: choose one with chat_template"):
        canonical_files(model)
