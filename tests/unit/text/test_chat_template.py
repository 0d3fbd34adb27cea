"""Chat templates: the same prompt as transformers renders, and nothing of the host within their reach."""

from __future__ import annotations

import json

import pytest

from nxd_infer.errors import ModelConfigError
from nxd_server.errors import RequestError
from nxd_server.text.chat_template import ChatTemplate, TemplateSources, marked_tokens
from nxd_server.text.tokenizer import Tokenizer
from tests.support import tiny_models

MESSAGES = [
    {"role": "system", "content": "Be brief & exact <b>."},
    {"role": "user", "content": "Hi 你好"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Why?"},
]
CHATML = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "    {%- if loop.index0 > 50 %}{% break %}{% endif %}\n"
    "{{ '<|im_start|>' + message.role + '\n' + message.content | trim }}{{ '<|im_end|>\n' }}\n"
    "{%- endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% if add_generation_prompt %}{% generation %}<|im_start|>assistant\n{% endgeneration %}{% endif %}"
)


@pytest.mark.parametrize("source", [CHATML, tiny_models.CHAT_TEMPLATE])
def test_the_prompt_equals_that_of_transformers(source, tmp_path):
    import transformers

    directory = tiny_models.write_tiny("llama", tmp_path / "m")
    (directory / "chat_template.jinja").write_text(source)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = ChatTemplate.from_dir(directory)
    assert ours is not None
    tools = [{"type": "function", "function": {"name": "f", "description": "<&> ünï"}}]
    for prompted, shown in ((True, None), (False, tools)):
        expected = theirs.apply_chat_template(MESSAGES, tools=shown, tokenize=False, add_generation_prompt=prompted)
        assert ours.render(MESSAGES, tools=shown, add_generation_prompt=prompted) == expected


@pytest.mark.parametrize("source", [CHATML, tiny_models.CHAT_TEMPLATE])
@pytest.mark.parametrize("said", ["So", " So \n", "", "Why?"])
def test_a_message_is_continued_as_transformers_does(source, said, tmp_path):
    import transformers

    directory = tiny_models.write_tiny("llama", tmp_path / "m")
    (directory / "chat_template.jinja").write_text(source)
    talk = [*MESSAGES, {"role": "assistant", "content": said}]
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    ours = ChatTemplate.from_dir(directory)
    assert ours is not None and ours.render(talk, continue_final_message=True) == expected
    parts = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": said}]}]
    assert ours.render(parts, continue_final_message=True) == expected


LOOPS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content | map(attribute='text') | join('|') }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
DUMPS = "{{ messages | tojson(separators=(',', ':')) }}"


@pytest.mark.parametrize(
    ("source", "as_text", "as_parts"),
    [
        (LOOPS, "Why?|", "Why?|How?|"),
        (EITHER, "Why?", "Why?|How?"),
        ("{{ messages[0].content[0].text }}", "Why?", "Why?\nHow?"),
        (PLAIN, "<user>Why?", "<user>Why?\nHow?"),
        (DUMPS, '[{"role":"user","content":"Why?"}]', r'[{"role":"user","content":"Why?\nHow?"}]'),
    ],
)
def test_the_users_text_is_in_the_prompt_in_whatever_form_it_comes(source, as_text, as_parts):
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": "Why?"}]) == as_text
    parts = [{"type": "text", "text": text} for text in ("Why?", "How?")]
    assert template.render([{"role": "user", "content": parts}]) == as_parts


CALLED = (
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city }}{% if m.content is "
    "defined %}null{% endif %}{% else %}{{ m.name }}{{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("arguments", [{"city": "Bern"}, '{"city": "Bern"}'])
def test_arguments_of_calls_are_objects_to_a_template_and_null_is_nothing(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    talk = [
        {"role": "user", "content": "?", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "dry"},
    ]
    assert ChatTemplate(CALLED).render(talk) == "?;Bernweatherdry;"
    assert talk[1]["tool_calls"][0]["function"]["arguments"] == arguments, "the caller's are left alone"


def test_documents_and_variables_reach_the_template():
    template = ChatTemplate("{{ documents[0].title }} {{ think }} {{ bos_token }}", {"bos_token": "<s>"})
    assert template.render(MESSAGES, documents=[{"title": "T"}], think=True, bos_token="B") == "T True B"


def test_marks_are_the_mask_of_transformers(tmp_path):
    import transformers

    directory = tiny_models.write_tiny("llama", tmp_path / "m")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), Tokenizer.from_dir(directory)
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
        "{% endfor %}"
    )
    talk = [*MESSAGES, {"role": "assistant", "content": "Because 你好."}]
    expected = theirs.apply_chat_template(
        talk, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    template = ChatTemplate(source, theirs.special_tokens_map)
    text, spans = template.render_marked(talk)
    assert [text[begin:end] for begin, end in spans] == ["Hello<|end|>", "Because 你好.<|end|>"]
    encoding = ours.raw.encode(text, add_special_tokens=False)
    assert encoding.ids == expected["input_ids"]
    assert marked_tokens(encoding.offsets, spans) == [bool(one) for one in expected["assistant_masks"]]
    assert template.has_marks and not ChatTemplate(PLAIN).has_marks


def test_a_template_is_that_of_the_files_or_the_one_that_was_asked_for(tmp_path):
    further = tmp_path / "additional_chat_templates"
    further.mkdir()
    (further / "tool_use.jinja").write_text("with tools")
    (further / "rag.jinja").write_text("with documents")
    assert ChatTemplate.from_dir(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ image_token }} plain")
    config = {"bos_token": "<s>", "image_token": "<i>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_dir(tmp_path)
    assert template is not None and template.render(MESSAGES) == "<s><i> plain"
    assert template.render(MESSAGES, tools=[{"type": "function"}]) == "with tools"
    (tmp_path / "own.jinja").write_text("own")
    for asked, wanted in (("rag", "with documents"), (str(tmp_path / "own.jinja"), "own")):
        sources = TemplateSources.from_dir(tmp_path, asked)
        assert sources is not None and sources.default == wanted
    with pytest.raises(ModelConfigError, match=r"chat_template = 'none'.*\(rag, tool_use\)"):
        TemplateSources.from_dir(tmp_path, "none")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('echo escaped') }}",
        "{{ messages.append({'role': 'system', 'content': 'injected'}) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_malicious_template_reaches_nothing(source):
    try:
        rendered = ChatTemplate(source).render(MESSAGES)
    except RequestError as error:
        assert error.field == "messages"
    else:
        assert rendered == ""  # the sandbox shows what is forbidden as undefined
    assert MESSAGES[0]["content"] == "Be brief & exact <b>." and len(MESSAGES) == 4


def test_a_template_may_refuse_with_its_own_words():
    template = ChatTemplate("{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}")
    with pytest.raises(RequestError, match="user first"):
        template.render(MESSAGES)


def test_a_template_that_is_no_jinja_is_refused_when_it_is_read():
    with pytest.raises(ModelConfigError, match="jinja2"):
        ChatTemplate("{% for x in %}")


def test_text_parts_are_joined_and_message_text_is_never_a_template():
    template = ChatTemplate("{{ messages[0].content }}{{ strftime_now('%Y') | length }}")
    parts = [{"type": "text", "text": "{{ 7 * 7 }}"}, {"type": "text", "text": "<b>"}]
    assert template.render([{"role": "user", "content": parts}]) == "{{ 7 * 7 }}\n<b>4"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_are_refused_by_field(messages, field):
    with pytest.raises(RequestError) as caught:
        ChatTemplate("{{ messages }}").render(messages)
    assert caught.value.field == field
