"""A tiny model that was taught to answer, to call tools, and to think aloud."""

from __future__ import annotations

import shutil
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from nxd_server.http.openai.chat import check_messages
from nxd_server.http.openai.tools import offered_tools
from nxd_server.text.chat_template import ChatTemplate
from nxd_server.text.tokenizer import Tokenizer
from tests.support.shared import shared
from tests.support.tiny_models import write_tiny

TEMPLATE = (  # as strict as those of Hermes 2 Pro, Hermes 3 and Llama 3.1 are
    "{% for tool in tools or [] %}{% set function = tool['function'] %}"
    "{{ function.name }}{{ function.description | tojson }}{{ function.parameters.properties | tojson }}{% endfor %}"
    "{% for m in messages %}"
    "{% if 'tool_calls' in m and not m['tool_calls'] %}{{ raise_exception('no call') }}{% endif %}"
    "{% if m['role'] == 'tool' %}<|user|>[{{ m['tool_call_id'] }}]{% if m['name'] != 'weather' %}"
    "{{ raise_exception('no name') }}{% endif %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% else %}<|assistant|>{{ m['content'] }}{% for call in m['tool_calls'] or [] %}<tool_call>"
    "{{ {'name': call['function']['name'], \"arguments\": call['function']['arguments']} | tojson }}"
    "</tool_call>{% endfor %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '<think>\n' if think is defined else '' }}{% endif %}"
    "{# </think> [TOOL_CALLS] #}"
)
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": None, "strict": True}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
STRANGE = {"type": "function", "function": {"name": "strange", "parameters": {"type": "object", "not": {}}}}
FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place", "days"],
            "additionalProperties": False,
            "$defs": {"place": {"enum": ["Bern", "Basel"]}},
        },
    },
}
VERDICT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
ASKED = {"role": "user", "content": "Rain?"}
SHOWN = 'weather""{}clock""{}'
CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "dry"}
TWO = "Both: <tool_call>" + CALL + '</tool_call>\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
MISTRAL = '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}'
LLAMA = '{"name": "weather", "parameters": {"city": "Bern"}}'
LESSONS = [
    (TOOLS, [ASKED], f"<tool_call>{CALL}</tool_call>"),
    ([], [ASKED], "No idea."),
    (TOOLS, [ASKED, CALLED, RESULT], "It is dry."),
    (TOOLS, [{"role": "user", "content": "Two!"}], TWO),
    (TOOLS, [{"role": "user", "content": "JSON"}], LLAMA),
    (TOOLS, [{"role": "user", "content": "Wind?"}], MISTRAL),
    ([], [{"role": "user", "content": "Why?"}], "<think>\nHm.\n</think>\n\nSo."),
    (TOOLS, [{"role": "user", "content": "Why?"}], f"<think>\nHm.\n</think>\n\n{MISTRAL}"),
]


def asked(content):
    return [{"role": "user", "content": content}]


def taught(path: Path) -> Path:
    """Write a tiny model that gives these answers; it learns them once a run."""
    return shutil.copytree(shared("taught/model", _teach), path)


def taught_artifact() -> Path:
    """The same, traced."""

    def trace_it(directory: Path) -> None:
        from nxd_infer import trace
        from nxd_models.serving import tasks

        shapes = {"batch_sizes": [2], "prompt_buckets": [64], "max_len": 320}
        model_dir = shared("taught/model", _teach)
        plan = tasks.plan(model_dir, "generate", dtype=torch.float32, model_name="taught", **shapes)
        with trace.parallel_model_trace(**plan.trace_arguments(), backend="eager") as model:
            trace.parallel_model_save(model, directory / "artifact")

    return shared("taught/traced", trace_it) / "artifact"


def _teach(path: Path) -> None:
    from nxd_models import registry

    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 320, "vocab_size": 320}
    write_tiny("llama", path, **sizes)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    raw = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    # Some models' are special tokens, which are not shown.
    raw.add_special_tokens(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"])
    raw.save(str(path / "tokenizer.json"))
    tokenizer, template = Tokenizer.from_dir(path), ChatTemplate.from_dir(path)
    rows = []
    for tools, messages, answer in LESSONS:
        shown = offered_tools(tools, None, "hermes")
        prompt = template.render(check_messages(messages, "hermes"), tools=shown)
        prompt = tokenizer.encode(prompt, add_special_tokens=False)
        rows.append((prompt, tokenizer.encode(answer + "<|end|>", add_special_tokens=False)))
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end], mask[row, :end] = torch.tensor(prompt + answer), 1
        labels[row, len(prompt) : end] = torch.tensor(answer)
    model = registry.load_model(path).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(500):
        loss, logits = model(ids, attention_mask=mask, labels=labels)
        wanted = labels[:, 1:] != -100
        if loss < 0.01 and (logits[:, :-1].argmax(-1)[wanted] == labels[:, 1:][wanted]).all():
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        raise AssertionError(f"it has not learnt its answers: {loss.item()}")
    save_file(model.state_dict(), path / "model.safetensors", {"format": "pt"})
