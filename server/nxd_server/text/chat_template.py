"""Render messages to a prompt with the model's chat template, in a sandbox.

Templates come only from the model directory, never from a request. They still run in jinja2's immutable
sandbox: a template cannot reach attributes outside its data, and cannot change its arguments.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import ModelConfigError
from nxd_server.errors import RequestError, TextTooLongError
from nxd_server.text.tokenizer import check_text, read_config, special_text
from nxd_server.text.tokenizer_files import TextFiles

if TYPE_CHECKING:
    from nxd_server.text.tokenizer_files import Source

MOST_CHARACTERS = 2**30
"""Longest rendered prompt in characters if no limit is given."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TemplateSources:
    """The sources of a model's chat templates, and the special tokens they may name. Nothing is compiled."""

    default: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    """Additional templates (``tool_use``, ``rag``) of the same model."""

    @classmethod
    def from_dir(cls, source: Source) -> TemplateSources | None:
        """Read the templates of a model directory or an artifact; None if it has none."""
        files = TextFiles(source)
        config = read_config(files)
        templates = _read_templates(files, config)
        if not templates:
            return None
        if "default" not in templates:
            raise ModelConfigError(
                f"{files.directory} names chat templates {sorted(templates)}, but none is the default"
            )
        special = {name: text for name in SPECIAL_NAMES if (text := special_text(config, name)) is not None}
        return cls(templates["default"], special, templates)


class ChatTemplate:
    """A compiled chat template and the special tokens it may name.

    A template is a program: rendering it, or even compiling it, may never end. A server runs it in a process that
    can be killed (:class:`~nxd_server.text.template_process.BoundedTemplate`).
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, named: Mapping[str, str] | None = None
    ):
        """``named`` holds additional templates (``tool_use``, ``rag``) of the same model; ``source`` is the default."""
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._template = compile_template(source)
        self._tools = compile_template(named["tool_use"]) if named and "tool_use" in named else self._template

    @classmethod
    def from_dir(cls, source: Source) -> ChatTemplate | None:
        """Compile the template of a model directory or an artifact; None if it has none."""
        sources = TemplateSources.from_dir(source)
        return None if sources is None else cls(sources.default, sources.special_tokens, sources.named)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        max_characters: int = MOST_CHARACTERS,
        **variables: Any,
    ) -> str:
        """Return the prompt as text, including special tokens: encode it with ``add_special_tokens=False``.

        Raises RequestError if the messages are invalid, if the template rejects them, or if the prompt has more than
        ``max_characters``.
        """
        template = self._tools if tools else self._template
        scope = {
            **self.special_tokens,
            **variables,
            "messages": normalise_messages(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
        }
        try:
            return _joined(template.generate(scope), max_characters)
        except _Refusal as error:
            raise RequestError("messages", f"the model's chat template refuses them: {error}") from None
        except (MemoryError, RequestError):
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise RequestError("messages", f"the model's chat template cannot render them: {error}") from error


def _joined(parts: Iterable[str], most: int) -> str:
    """Join the parts; stop at the first that makes the text longer than ``most``."""
    kept, size = [], 0
    for part in parts:
        size += len(part)
        if size > most:
            raise TextTooLongError(
                "messages",
                f"the model's chat template makes more than {most} characters of them, and at most so many can "
                "fit into this model's maximum context length",
            )
        kept.append(part)
    return "".join(kept)


def normalise_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages with plain text as content. Joins parts of type ``text`` by line breaks, as vLLM does;
    rejects other parts by name."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages", "must be a list with at least one message")
    result = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, Mapping):
            raise RequestError(where, f"must be an object with role and content, got {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"{where}.role", f"must be a non-empty string, got {role!r}")
        check_text(role, f"{where}.role")
        plain = {key: value for key, value in message.items() if value is not None}
        plain["content"] = _content(message.get("content"), f"{where}.content", bool(message.get("tool_calls")))
        result.append(plain)
    return result


def _content(content: Any, where: str, optional: bool) -> str:
    if isinstance(content, str):
        return check_text(content, where)
    if content is None and optional:
        return ""
    if isinstance(content, Sequence) and content:
        texts = []
        for place, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise RequestError(f"{where}[{place}]", f"only parts of type 'text' are supported, got {kind!r}")
            texts.append(check_text(part.get("text"), f"{where}[{place}].text"))
        return "\n".join(texts)
    raise RequestError(where, "must be a string or a non-empty list of text parts")


class _Refusal(Exception):
    """Raised by ``raise_exception(...)`` in a template."""


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@functools.cache
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text for training; here its body is rendered unchanged."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def compile_template(source: str) -> Any:
    """Compile a template in the sandbox. Raises ModelConfigError if it is not valid jinja2."""
    from jinja2 import TemplateError

    try:
        return _environment().from_string(source)
    except (TemplateError, RecursionError) as error:
        raise ModelConfigError(f"the model's chat template is not valid jinja2: {error}") from error


def _read_templates(files: TextFiles, config: dict[str, Any]) -> dict[str, str]:
    """Return templates by name: ``chat_template.jinja``, ``chat_template.json``, or ``tokenizer_config.json``."""
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if (path := files.find("chat_template.json")) is not None:
        try:
            value = json.loads(_text_of(path)).get("chat_template", value)
        except (ValueError, AttributeError, RecursionError) as error:
            raise ModelConfigError(f"{path} is not a chat template file: {error}") from error
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for item in value:
            name, source = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(source, str):
                raise ModelConfigError(f"{files.directory}: chat_template holds an entry without a name and a template")
            templates[name] = source
    if (path := files.find("chat_template.jinja")) is not None:
        templates["default"] = _text_of(path)
    for path in files.find_in("additional_chat_templates", ".jinja"):
        templates[path.stem] = _text_of(path)
    return templates


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
