"""What the server logs, in which form, and what happens where nobody reads it."""

from __future__ import annotations

import fcntl
import json
import logging
import os

from nxd_server.http.ops.logs import LogWriter, Seldom, TextFormatter
from tests.support.http.http_servers import toy_server, wait_for

COMPLETIONS = "/v1/completions"


def test_logs_as_json_are_one_object_a_line():
    with toy_server(log_format="json") as server:
        server.post(
            COMPLETIONS, {"prompt": "a", "max_tokens": 2}, headers={"X-Request-Id": "abc", "X-Forwarded-For": "8.8.8.8"}
        )
        server.get("/nope%0Aforged line")
        for body in ({"prompt": "a", "max_tokens": 9999}, {"prompt": "a", "my secret words": 1}, {"prompt": ["a", 5]}):
            server.post(COMPLETIONS, body, headers={"X-Request-Id": "refused", "Authorization": "Bearer sesame"})
        assert server.stop() == 0
    records = [json.loads(line) for line in server.lines]
    access = [record for record in records if record["logger"] == "nxd_server.access"]
    assert {record["status"] for record in access} >= {200, 404}
    (mine,) = [record for record in access if record["request_id"] == "abc"]
    assert mine["path"] == COMPLETIONS and mine["method"] == "POST" and mine["seconds"] > 0 and mine["bytes"] > 0
    assert "error_code" not in mine
    refused = [record for record in access if record["request_id"] == "refused"]
    assert [(one["status"], one["error_type"], one["error_code"], one["param"]) for one in refused] == [
        (400, "invalid_request_error", "context_length_exceeded", "max_tokens"),
        (400, "invalid_request_error", "unknown_parameter", "(not a field's name)"),
        (400, "invalid_request_error", "invalid_request", "prompt[0]"),
    ]
    assert "invalid_request_error context_length_exceeded param=max_tokens" in refused[0]["message"]
    (missing,) = [record for record in access if record["status"] == 404]
    assert missing["error_code"] == "not_found" and "param" not in missing
    assert not any(word in server.log for word in ("secret", "sesame", "9999")), "what was asked is nobody's to read"
    assert mine["client"] and "8.8.8.8" not in server.log, "unless a proxy is trusted, a client names no other"


def test_a_log_that_nobody_reads_stops_no_answer():
    """The requests fill the smallest pipe many times over."""
    with toy_server(log_format="json") as server:
        server.reads.clear()  # what it logs stays in the smallest pipe there is
        fcntl.fcntl(server.process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(200):
            assert server.get("/version").status_code == 200
        server.reads.set()
        wait_for(lambda: server.log.count('"/version"') == 200)
        assert server.stop() == 0


def test_lines_that_find_no_room_are_counted():
    """With a real pipe: what waits is written in order once somebody reads, and how many lines are missing."""
    reader, writer = os.pipe()
    handler = LogWriter(writer, limit=10)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.close(writer)
    for number in range(400):
        handler.handle(logging.LogRecord("nxd_server", logging.INFO, "", 0, f"line {number:0100}", (), None))
    handler.close()  # it ends though nobody reads: a server's end does not wait for that
    found, dropped = [], 0
    with os.fdopen(reader) as log:
        for line in log:  # until the writing thread has ended
            words = line.split()
            if words[0] == "line":
                found.append(int(words[1]))
            else:
                assert words[1:6] == ["lines", "of", "the", "log", "were"]
                dropped += int(words[0])
    assert len(found) + dropped == 400 and 10 <= len(found) < 400 and found == sorted(found)


def test_a_line_of_text_logs_cannot_be_forged():
    record = logging.LogRecord("nxd_server.access", logging.INFO, "", 0, "GET %s", ("/a\n12:00 INFO \x1b[31m\r",), None)
    assert TextFormatter().format(record).count("\n") == 0
    assert "\x1b" not in TextFormatter().format(record)


def test_a_library_that_repeats_itself_is_heard_at_once_and_then_seldom():
    told, handler, clock = [], logging.Handler(), iter((*range(7), 70, 71))
    handler.emit = lambda record: told.append(record.getMessage())
    handler.addFilter(Seldom(60.0, lambda: next(clock)))

    def say(name, level=logging.WARNING, message="no %s"):
        handler.handle(logging.LogRecord(name, level, "", 0, message, ("receiver",), None))

    for _ in range(5):
        say("opentelemetry.exporter")
    assert told == ["no receiver"]
    say("opentelemetry.exporter", logging.ERROR)
    say("nxd_server")
    say("nxd_server")
    assert told == ["no receiver"] * 4, "of another level, and what is our own"
    say("opentelemetry.exporter", message="a wrong key for the %s")
    say("opentelemetry.exporter")
    assert told[4:] == ["a wrong key for the receiver", "no receiver (4 more since the last such line)"]
