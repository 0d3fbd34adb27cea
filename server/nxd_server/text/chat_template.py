"""Render messages to a prompt with the model's chat template, in a sandbox.

Templates come only from the model directory, never from a request. They still run in jinja2's immutable
sandbox: a template cannot reach attributes outside its data, and cannot change its arguments.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import ModelConfigError
from nxd_infer.hugging_face.tokenizer import FURTHER_TEMPLATES, TEMPLATE, read_template
from nxd_server.errors import RequestError, TextTooLongError
from nxd_server.text.conversation import normalise_messages
from nxd_server.text.tokenizer import read_config
from nxd_server.text.tokenizer_files import TextFiles

if TYPE_CHECKING:
    from nxd_server.text.tokenizer_files import Source

MOST_CHARACTERS = 2**30
"""Longest rendered prompt in characters if no limit is given."""
AT_THE_END = frozenset({"add_generation_prompt", "continue_final_message", "max_characters"})
"""What :meth:`ChatTemplate.render` takes for the end of the prompt."""
RESERVED = AT_THE_END | {"self", "messages", "tools", "documents"}
"""Names that no variable of a template may have."""
TOOL_CALLS = "[TOOL_CALLS]"
"""In Mistral's templates, which take ids of tool calls in their own form only."""


@dataclass(frozen=True)
class TemplateSources:
    """The sources of a model's chat templates, and the special tokens they may name. Nothing is compiled."""

    default: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    """Additional templates (``tool_use``, ``rag``) of the same model."""

    @classmethod
    def from_dir(cls, source: Source, chat_template: str | None = None) -> TemplateSources | None:
        """Read the canonical templates in a directory or an artifact; None if there are none.

        ``chat_template``: a file with another default, or the name of one of the further templates.
        """
        files = TextFiles(source)
        config = read_config(files)
        named = {path.stem: _text_of(path) for path in files.find_in(FURTHER_TEMPLATES, ".jinja")}
        special = {name: text for name, text in config.items() if name.endswith("_token") and isinstance(text, str)}
        if chat_template is not None:
            default = named.get(chat_template) or read_template(chat_template, sorted(named))
        elif (path := files.find(TEMPLATE)) is not None:
            default = _text_of(path)
        else:
            return None
        return cls(default, special, named)


class ChatTemplate:
    """A compiled chat template and the special tokens it may name; renders what transformers' ``apply_chat_template``
    does.

    A template is a program: rendering it, or even compiling it, may never end. A server runs it in a process that
    can be killed (:class:`~nxd_server.text.template_process.BoundedTemplate`).
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, named: Mapping[str, str] | None = None
    ):
        """``named`` holds additional templates (``tool_use``, ``rag``) of the same model; ``source`` is the default."""
        self.source = source
        self.sources = (source, *(named or {}).values())
        self.special_tokens = dict(special_tokens or {})
        self._default = _Compiled(source, self.special_tokens)
        self._tools = _Compiled(named["tool_use"], self.special_tokens) if named and "tool_use" in named else None

    @classmethod
    def from_dir(cls, source: Source) -> ChatTemplate | None:
        """Compile the template of a model directory or an artifact; None if it has none."""
        sources = TemplateSources.from_dir(source)
        return None if sources is None else cls(sources.default, sources.special_tokens, sources.named)

    @property
    def has_marks(self) -> bool:
        """Whether the template marks what the assistant says, for :meth:`render_marked`."""
        return all(one.has_marks for one in (self._default, self._tools) if one is not None)

    def names(self, name: str) -> bool:
        """Whether the template, or one of the model's others, has ``name`` in it, and so may read what is called so."""
        return any(name in source for source in self.sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        max_characters: int = MOST_CHARACTERS,
        **variables: Any,
    ) -> str:
        """Return the prompt as text, including special tokens: encode it with ``add_special_tokens=False``.

        With ``continue_final_message`` it ends where the last message's text does, and not with a prompt for another.

        Content is given to the template as it came, a text or a list of text parts; in the other form if the template
        cannot take this one. Arguments of tool calls are objects to it, or JSON text if it takes only that.
        ``variables`` are the template's own, such as ``enable_thinking``.

        Raises RequestError if the messages are invalid, if the template rejects them, or if the prompt has more than
        ``max_characters``.
        """
        begins = add_generation_prompt and not continue_final_message
        variables |= {"add_generation_prompt": begins, "tools": tools, "documents": documents}
        text = self._render(messages, variables, _Tracker(max_characters), continue_final_message)
        if not continue_final_message:
            return text
        text, mark, rest = text.rpartition(_END)
        if not mark:
            raise RequestError("messages", "the model's chat template does not show the last message's text at its end")
        return text if rest.startswith(" ") else text.rstrip()  # the template takes blanks from the end of texts

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation without a prompt for a further answer, and the characters (begin, end) that the
        template marks as the assistant's (``{% generation %}``); raises as :meth:`render`."""
        tracker = _Tracker(MOST_CHARACTERS)
        variables |= {"add_generation_prompt": False, "tools": tools, "documents": documents}
        return self._render(messages, variables, tracker), tracker.spans

    def _render(self, messages: Any, variables: dict[str, Any], tracker: _Tracker, marked: bool = False) -> str:
        chosen = self._default if variables["tools"] is None or self._tools is None else self._tools
        prepared = normalise_messages(messages, short_ids=TOOL_CALLS in chosen.source)
        if marked:
            _mark_end(prepared[-1])
        try:
            for message in prepared:
                chosen.form(message)
            return chosen.text({**variables, "messages": prepared}, tracker)
        except _Refusal as error:
            raise RequestError("messages", f"the model's chat template refuses them: {error}") from None
        except (MemoryError, RequestError):
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise RequestError("messages", f"the model's chat template cannot render them: {error}") from error


def marked_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each token, by its characters (begin, end), whether it overlaps one of the ascending ``spans``: the
    mask of transformers' ``return_assistant_tokens_mask``."""
    marks, place = [], 0
    for begin, end in offsets:
        while place < len(spans) and begin >= spans[place][1]:
            place += 1
        marks.append(place < len(spans) and end > spans[place][0])
    return marks


class _Tracker:
    """What is known of a rendering while it goes on."""

    def __init__(self, most: int):
        self.most = most
        self.size = 0
        self.spans: list[tuple[int, int]] = []


_TRACKER: ContextVar[_Tracker | None] = ContextVar("tracker", default=None)
"""Of the rendering that goes on in this thread."""


class _Compiled:
    """One template of a model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self.has_marks = _MARK.search(source) is not None
        self._special_tokens = special_tokens
        self._template = compile_template(source)
        self._known: dict[str, set[str]] = {}
        """The forms of content that messages of a role may have."""

    def text(self, scope: Mapping[str, Any], tracker: _Tracker) -> str:
        """Render; stop at the first piece that makes the text longer than the tracker's ``most``."""
        kept, token = [], _TRACKER.set(tracker)
        try:
            for part in self._template.generate({**self._special_tokens, **scope}):
                tracker.size += len(part)
                if tracker.size > tracker.most:
                    raise TextTooLongError(
                        "messages",
                        f"the model's chat template makes more than {tracker.most} characters of them, and at most so "
                        "many can fit into this model's maximum context length",
                    )
                kept.append(part)
        finally:
            _TRACKER.reset(token)
        return "".join(kept)

    def form(self, message: dict[str, Any]) -> None:
        """Put a message into the form that the template takes: its content as it is, as one text, a line for each part,
        or as a list of one part with that text; its tool calls, and content that says nothing beside them."""
        if message.get("tool_calls"):
            missing, as_text = self._call_form
            if not message.get("content"):
                message.update(missing)
            for call in message["tool_calls"]:
                function, given = call["function"], call["function"]["arguments"]
                if as_text != isinstance(given, str):
                    function["arguments"] = json.dumps(given, ensure_ascii=False) if as_text else json.loads(given)
        content = message.get("content")
        if content is None:
            return
        forms, is_text = self._forms(message["role"]), isinstance(content, str)
        if ("text" if is_text else "parts") in forms:
            message["content"] = content if is_text else list(content)
            return
        text = content if is_text else "\n".join(part["text"] for part in content)
        message["content"] = [{"type": "text", "text": text}] if forms and "text" not in forms else text

    @functools.cached_property
    def _call_form(self) -> tuple[Mapping[str, str | None], bool]:
        """What stands for content that says nothing beside tool calls, and whether their arguments are text: the first
        form in which a call comes into the prompt, in no notation of Python's, and not as text in JSON."""
        name, value = _PROBES
        for as_text, missing in itertools.product((False, True), ({}, {"content": None}, {"content": ""})):
            call = _call(json.dumps({name: value}) if as_text else {name: value})
            for tools in (None, [_TOOL]):
                text = self._probed([*self._asked(), {**call, **missing}], tools)
                if all(word in text for word in (name, value, _FUNCTION)) and not _QUOTED.search(text):
                    return missing, as_text
        return {}, False

    def _asked(self) -> list[dict[str, Any]]:
        asked = {"role": "user", "content": "a"}
        self.form(asked)
        return [asked]

    def _forms(self, role: str) -> set[str]:
        """Of the content of a role's messages, those forms whose words come into the prompt, and not in the notation of
        a list; those of a user's if the template renders no such message, and none if not even that."""
        if role not in ("system", "assistant", "tool"):
            role = "user"
        if role not in self._known:
            self._known[role] = self._found_forms(role) or (set() if role == "user" else self._forms("user"))
        return self._known[role]

    def _found_forms(self, role: str) -> set[str]:
        before = [] if role in ("user", "system") else self._asked()
        behind = self._asked() if role == "system" else []
        if role == "tool":
            before.append(_call({}))
            self.form(before[-1])
        parts = [{"type": "text", "text": probe} for probe in _PROBES]
        found = set()
        for form, content in (("text", _PROBES[0]), ("part", parts[:1]), ("parts", parts)):
            text = self._probed([*before, {"role": role, "content": content}, *behind])
            words = _PROBES if form == "parts" else _PROBES[:1]
            if all(word in text for word in words) and (form == "text" or not _LISTED.search(text)):
                found.add(form)
        return found

    def _probed(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """Return the prompt of these messages; empty if the template cannot render them."""
        scope = {"messages": messages, "tools": tools, "documents": None}
        try:
            return self.text({**scope, "add_generation_prompt": False}, _Tracker(MOST_CHARACTERS))
        except MemoryError:
            raise
        except Exception:
            return ""


_END = "zq5probe"


def _mark_end(message: dict[str, Any]) -> None:
    """Put a mark, and a blank, at the end of a message's text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        message["content"] = f"{content}{_END} "
    else:
        message["content"] = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_END} "}]


_PROBES = ("zq1probe", "zq2probe")
_FUNCTION = "zq3probe"
_LISTED = re.compile(rf"""text["']\s*:\s*["']{_PROBES[0]}""")
"""Parts in the notation of a list, of Python's or JSON's."""
_QUOTED = re.compile(rf"""'{_PROBES[0]}'\s*:|\\+"{_PROBES[0]}""")
"""Arguments of a call in Python's notation, or as text in JSON."""
_TOOL = {
    "type": "function",
    "function": {"name": "a", "description": "a", "parameters": {"type": "object", "properties": {}}},
}


_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": _FUNCTION, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "zq4probe0", "type": "function", "function": function}]}


class _Refusal(Exception):
    """Raised by ``raise_exception(...)`` in a template."""


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what the assistant says; its text is rendered unchanged."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            text, tracker = caller(), _TRACKER.get()
            if tracker is not None:
                tracker.spans.append((tracker.size, tracker.size + len(text)))
            return text

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def compile_template(source: str) -> Any:
    """Compile a template in the sandbox. Raises ModelConfigError if it is not valid jinja2."""
    from jinja2 import TemplateError

    try:
        return _environment().from_string(source)
    except (TemplateError, RecursionError) as error:
        raise ModelConfigError(f"the model's chat template is not valid jinja2: {error}") from error


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
