"""The main function of a :class:`~nxd_server.text.text_process.TextProcess`: reads and writes frames on stdin."""

from __future__ import annotations

import functools
import json
import marshal
import os
import resource
import signal
import socket
from array import array
from collections.abc import Callable
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_infer.util.memory import give_back
from nxd_infer.util.this_process import ignore_stop
from nxd_server.errors import BodyError, PromptTooLongError, RequestError, TextTooLongError
from nxd_server.text.chat_template import ChatTemplate
from nxd_server.text.field_bounds import Bounds
from nxd_server.text.text_process import START_SECONDS, read_frame, write_frame
from nxd_server.text.tokenizer import Tokenizer

TEMPLATE_MEMORY = 256 * 2**20
TEXT_MEMORY = 1024 * 2**20
"""Bytes a job may allocate beyond what the process uses when it is ready."""
KEPT_MEMORY = 2 * 2**20
"""A process that has grown by more than this exits, because only then is all memory returned to the system."""

TOO_LONG = (TextTooLongError, PromptTooLongError)

Answer = tuple[dict[str, Any], bytes]
Job = Callable[[dict[str, Any], bytes], Answer]


def main() -> None:
    """Serve jobs until the server closes the connection."""
    ignore_stop()
    connection = socket.socket(fileno=os.dup(0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _end_in(START_SECONDS)
    write_frame(connection, {})  # it has started: what ends it from here on is what it reads
    try:
        job = _prepare(*read_frame(connection))
    except ModelConfigError as error:
        write_frame(connection, {"refused": ["", str(error)]})
        return
    _end_in(None)
    write_frame(connection, {})
    resident = _bytes(1)
    while True:
        try:
            header, blob = read_frame(connection)
        except EOFError:
            return
        _end_in(header["seconds"])
        answer, data = _answered(job, header, blob)
        _end_in(None)
        last = answer.get("last", False) or _has_grown(resident + len(blob) + len(data))
        write_frame(connection, {**answer, "last": last}, data)
        if last:
            return
        del header, blob, answer, data


def _end_in(seconds: float | None) -> None:
    """Die shortly after ``seconds``, by SIGALRM, in case the server is no longer there to kill this process."""
    signal.setitimer(signal.ITIMER_REAL, 0.0 if seconds is None else seconds + 1.0)


def _limit_memory(size: int) -> None:
    """Let this process allocate ``size`` bytes more than it has now."""
    limit = _bytes(0) + size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answered(job: Job, header: dict[str, Any], blob: bytes) -> Answer:
    try:
        return job(header, blob)
    except RequestError as error:
        answer: dict[str, Any] = {"refused": [error.field, error.message]}
        if isinstance(error, BodyError):
            answer["code"] = error.code
        return {**answer, "too_long": isinstance(error, TOO_LONG)}, b""
    except MemoryError:
        return {"memory": True, "last": True}, b""


def _prepare(header: dict[str, Any], blob: bytes) -> Job:
    if header["kind"] == "template":
        return _template_job(header)
    job = _json_job() if header["kind"] == "json" else _tokenizer_job(header, blob)
    _limit_memory(TEXT_MEMORY)
    return job


def _template_job(setup: dict[str, Any]) -> Job:
    _limit_memory(TEMPLATE_MEMORY)
    # Compile only in this process: jinja2 evaluates constants while it compiles, so compiling alone may never end.
    template = ChatTemplate(setup["source"], setup["special_tokens"], setup["named"])

    def render(header: dict[str, Any], blob: bytes) -> Answer:
        messages, variables = marshal.loads(blob)  # nosec B302  # from the server
        text = template.render(messages, max_characters=header["most"], **variables)
        return {}, text.encode()

    return render


def _json_job() -> Job:
    from nxd_server.text.strict_json import parse_json  # slow: pydantic_core, which the other kinds do without

    # The server decodes marshal data in a fraction of the time that JSON takes.
    return lambda header, blob: ({}, marshal.dumps(parse_json(blob, Bounds(**header["bounds"]))))


def _tokenizer_job(setup: dict[str, Any], blob: bytes) -> Job:
    from tokenizers import Tokenizer as RawTokenizer

    tokenizer = Tokenizer(RawTokenizer.from_str(blob.decode()), setup["config"])

    def work(header: dict[str, Any], blob: bytes) -> Answer:
        if header["do"] == "detokenize":
            ids = array("q", blob)
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            return {}, json.dumps({"prompt": text}, ensure_ascii=False, separators=(",", ":")).encode()
        if header["do"] == "types":
            options = {name: header[name] for name in ("field", "most", "limit")}
            ids, types = tokenizer.encode_with_types(*marshal.loads(blob), **options)  # nosec B302  # from the server
            return {}, array("q", [*ids, *types]).tobytes()
        special, field, most = header["special"], header["field"], header.get("most")
        ids = tokenizer.encode(blob.decode(), add_special_tokens=special, field=field, most=most)
        if header["do"] == "encode":
            return {}, array("q", ids).tobytes()
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": header["max_model_len"], "tokens": ids}
        if header["strings"]:
            answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
        return {"count": len(ids)}, json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()

    return work


def _has_grown(expected: int) -> bool:
    """Whether this process holds much more memory than ``expected``, after returning what is free."""
    if _bytes(1) - expected > KEPT_MEMORY:
        give_back()
    return _bytes(1) - expected > KEPT_MEMORY


def _bytes(field: int) -> int:
    """Return the bytes of address space (0) or of resident memory (1) of this process."""
    return int(os.pread(_statm(), 200, 0).split()[field]) * resource.getpagesize()


@functools.cache
def _statm() -> int:
    """Return the open file, which is kept because it is read after every job."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
