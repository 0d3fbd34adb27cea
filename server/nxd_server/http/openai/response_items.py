"""The items of ``/v1/responses``: checked, and as the messages of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from nxd_server.http.blocks import Block, check_answers, text_parts
from nxd_server.http.error_responses import bad_request, check_fields, clip, missing_field, unsupported, wrong

ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text", "text", "refusal")
FIELDS = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    "function_call_output": frozenset({"type", "id", "status", "call_id", "output"}),
    "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
    "item_reference": frozenset({"type", "id"}),
}
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Of the ids."""


def new_id(kind: str) -> str:
    return f"{PREFIXES[kind]}_{uuid.uuid4().hex}"


def checked_items(given: Any, find: Callable[[str], dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return ``input`` as a list of items, each with its id; ``find``: an item of a stored response, by its id.

    Raises ApiError: 400 naming the field.
    """
    if isinstance(given, str):
        return [_with_id({"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]})]
    if not isinstance(given, list):
        raise wrong("input", "must be a string or a list of items")
    return [_checked(item, f"input[{place}]", find) for place, item in enumerate(given)]


def _with_id(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "id": item.get("id") or new_id(item["type"])}


def _checked(item: Any, where: str, find: Callable[[str], dict[str, Any] | None]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise wrong(where, "must be an object")
    kind = item.get("type") or (
        "message" if "role" in item else "item_reference" if set(item) <= {"id", "type"} else None
    )
    if kind not in FIELDS:
        raise unsupported(f"{where}.type", f"items are {', '.join(FIELDS)}; got {clip(repr(kind))}")
    check_fields(item, FIELDS[kind], where)
    texts = {"message": ("role",), "function_call": ("call_id", "name", "arguments"), "reasoning": ()}
    for name in (*texts.get(kind, ("call_id",) if kind == "function_call_output" else ("id",)), "id"):
        value = item.get(name)
        if value is None and name != "id":
            raise missing_field(f"{where}.{name}")
        if not isinstance(value, str | None):
            raise wrong(f"{where}.{name}", "must be a string")
    if kind == "item_reference":
        found = find(item.get("id") or "")
        if found is None:
            raise bad_request(
                f"`{where}.id`: no stored response has the item {clip(str(item.get('id')))!r}", f"{where}.id"
            )
        return found
    if kind == "message":
        if item["role"] not in ROLES:
            raise wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        text_parts(item.get("content"), f"{where}.content", PARTS)
        if isinstance(item["content"], str):  # as it is stored and listed
            part = "output_text" if item["role"] == "assistant" else "input_text"
            item = {**item, "content": [{"type": part, "text": item["content"]}]}
    elif kind == "function_call_output":
        text_parts(item.get("output"), f"{where}.output", PARTS)
    elif kind == "reasoning":
        if item.get("encrypted_content"):
            raise unsupported(f"{where}.encrypted_content", "reasoning is not encrypted here: send its `content`")
        if item.get("summary") and not item.get("content"):
            raise unsupported(f"{where}.summary", "a summary is not what the model has thought: send `content`")
        text_parts(item.get("content") or [], f"{where}.content", ("reasoning_text",))
    return _with_id({**item, "type": kind})


def messages_of(
    instructions: str | None, items: Sequence[dict[str, Any]], places: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of a chat, and where each comes from; ``places``: of the items.

    What one answer consists of (its reasoning, its text, its calls) is one message. Instructions and the system's
    messages right behind them are one, too: most templates take no more.
    """
    messages: list[dict[str, Any]] = []
    origins: list[str] = []

    def add(message: dict[str, Any], place: str) -> None:
        messages.append(message)
        origins.append(place)

    if instructions:
        add({"role": "system", "content": instructions}, "instructions")
    joins = False
    """Whether the last message is an answer that the next item continues."""
    for item, place in zip(items, places, strict=True):
        kind, role = item["type"], item.get("role")
        if kind == "function_call_output":
            output = text_parts(item["output"], f"{place}.output", PARTS)
            add({"role": "tool", "tool_call_id": item["call_id"], "content": output}, place)
            joins = False
        elif kind == "message" and role != "assistant":
            content = text_parts(item["content"], f"{place}.content", PARTS)
            first = messages[0] if len(messages) == 1 and origins == ["instructions"] else None
            if first is not None and role in ("system", "developer"):
                said = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
                first["content"] += f"\n\n{said}"
            else:
                add({"role": role, "content": content}, place)
            joins = False
        else:
            if not joins or (kind == "message" and messages[-1].get("content") and "tool_calls" not in messages[-1]):
                add({"role": "assistant", "content": None}, place)
            joins = True
            _extend(messages[-1], item, place)
    check_answers(messages, origins, "call_id")
    return messages, origins


def _extend(message: dict[str, Any], item: dict[str, Any], place: str) -> None:
    """Add an item to the assistant's message."""
    if item["type"] == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message["tool_calls"] = [*message.get("tool_calls", ()), call]
    elif item["type"] == "reasoning":
        thought = "".join(part["text"] for part in item.get("content") or ())
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    elif message["content"]:
        said = [message["content"], text_parts(item["content"], f"{place}.content", PARTS)]
        message["content"] = "".join(
            one if isinstance(one, str) else "".join(part["text"] for part in one) for one in said
        )
    else:
        message["content"] = text_parts(item["content"], f"{place}.content", PARTS)


def item_of(block: Block, status: str) -> dict[str, Any]:
    """Return a block of an answer as an item; ``status``: in_progress (it has no text yet), completed, incomplete."""
    empty = status == "in_progress"
    if block.kind == "reasoning":
        content = [] if empty else [part_of(block, block.text)]
        item: dict[str, Any] = {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
    elif block.kind == "text":
        item = {"type": "message", "role": "assistant", "content": [] if empty else [part_of(block, block.text)]}
    else:
        arguments = "" if empty else block.text
        item = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": arguments}
    return {"id": id_of(block), **item, "status": status}


def id_of(block: Block) -> str:
    return f"{ {'reasoning': 'rs', 'text': 'msg', 'call': 'fc'}[block.kind] }_{block.id}"


def part_of(block: Block, text: str) -> dict[str, Any]:
    """Return the only part of a reasoning or of a message."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
