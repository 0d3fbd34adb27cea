"""What processes for texts cost the server: little to send, nothing twice, and no time of those who stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from nxd_infer.errors import ModelConfigError
from nxd_server.app.served_model import ServedModel
from nxd_server.errors import BodyError, EngineUnavailableError, RequestError, TextTooLongError
from nxd_server.settings import ServerSettings
from nxd_server.text import text_process as process
from nxd_server.text import text_process_jobs
from nxd_server.text.chat_template import TemplateSources
from nxd_server.text.field_bounds import ANY, Bounds
from nxd_server.text.text_process import NICENESS, JobFailed, Setup, TextProcess
from nxd_server.text.text_process_jobs import BoundedJson, BoundedTemplate, BoundedTokenizer
from tests.support import tiny_models
from tests.support.http.http_toy import toy_tokenizer


@pytest.fixture(autouse=True)
def slow_starts_are_waited_for(monkeypatch):
    monkeypatch.setattr(process, "START_SECONDS", 300.0)


@pytest.fixture
def bounded():
    bounded = BoundedTokenizer(toy_tokenizer(), 60, 1)
    yield bounded
    bounded.stop()


def nice(pid: int | None) -> int:
    assert pid is not None
    return os.getpriority(os.PRIO_PROCESS, pid)


def test_each_of_them_leaves_streams_the_cores_from_its_first_moment(bounded, monkeypatch):
    started: list[int] = []
    whole = process.TextProcess._ask

    def ask(self, header, *more):
        started.append(nice(self.pid) if "kind" in header and whole(self, header, *more) else 0)
        return ({}, b"") if "kind" in header else whole(self, header, *more)

    monkeypatch.setattr(process.TextProcess, "_ask", ask)
    template, parser = BoundedTemplate(TemplateSources("{{ messages[0].content }}"), 60, 1), BoundedJson(60, 1)
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    try:
        template.check()
        asyncio.run(parser.parse(b'{"a": 1}', ANY))
        asyncio.run(bounded.encode("hello", special=False, most=9, field="prompt"))
        for one in (template, parser, bounded):
            assert nice(one._process.pid) == expected
    finally:
        template.stop()
        parser.stop()
    assert started.count(expected) == 3


def test_ids_of_a_long_text_are_those_of_the_tokenizer_and_more_than_fit_are_not_sent(bounded):
    text = "hello, you. " * 20_000
    ids = toy_tokenizer().encode(text)

    async def main():
        assert await bounded.encode(text, special=True, most=len(ids), field="prompt") == ids
        with pytest.raises(TextTooLongError, match=f"has {len(ids)} tokens; .* {len(ids) - 1} tokens") as caught:
            await bounded.encode(text, special=True, most=len(ids) - 1, field="messages")
        assert caught.value.field == "messages"

    asyncio.run(main())


@pytest.fixture
def parser():
    process = TextProcess(lambda: Setup({"kind": "json"}))
    yield process
    process.stop()


def parse(process, job=None):
    return process.run({"bounds": {}}, b'{"a": 1}', seconds=120, job=job)


def test_a_client_that_leaves_when_its_answer_has_come_ends_no_job_of_the_next(parser, monkeypatch):
    """Beside clients that left, six of a hundred conversations of another were a 400 for taking too much memory."""
    read, mine = process.read_frame, object()

    def leave(connection, seconds=None):
        found = read(connection, seconds)
        parser.cancel(mine)
        return found

    parse(parser)
    monkeypatch.setattr(process, "read_frame", leave)
    parse(parser, mine)
    monkeypatch.setattr(process, "read_frame", read)
    assert parse(parser) == parse(parser)


def test_a_process_that_died_while_it_had_nothing_to_do_is_started_again(parser):
    answer = parse(parser)
    first = parser._process
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert parse(parser) == answer
    assert parser.pid not in (None, first.pid)


def test_it_is_not_ended_by_a_signal_to_all_processes_of_the_server(parser):
    """As the end of a service or of a machine sends it: what runs still needs the process."""
    answer, pid = parse(parser), parser.pid
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    assert parse(parser) == answer
    assert parser.pid == pid


JOBS = {
    "check": lambda: BoundedTemplate(TemplateSources("{{ messages }}"), 60, 1).check(),
    "render": lambda: asyncio.run(BoundedTemplate(TemplateSources("{{ messages }}"), 60, 1).render([], {}, 9)),
    "encode": lambda: asyncio.run(
        BoundedTokenizer(toy_tokenizer(), 60, 1).encode("a", special=False, most=9, field="prompt")
    ),
    "parse": lambda: asyncio.run(BoundedJson(60, 1).parse(b"{}", ANY)),
}


@pytest.mark.parametrize("job", JOBS)
def test_where_no_process_starts_neither_the_request_nor_the_template_is_to_blame(monkeypatch, job):
    monkeypatch.setattr(process, "_COMMAND", "raise SystemExit(1)")
    with pytest.raises(EngineUnavailableError, match="did not start") as caught:
        JOBS[job]()
    assert caught.value.state == "busy" and caught.value.retry_after


def test_a_job_whose_client_has_left_is_not_begun_and_the_process_goes_on(parser):
    parse(parser)
    pid, mine = parser.pid, object()
    parser.cancel(mine)
    with pytest.raises(JobFailed):
        parse(parser, mine)
    parse(parser)
    assert parser.pid == pid


def test_nothing_of_a_body_that_is_refused_comes_back(monkeypatch):
    """The server would build it a second time, which holds up everybody."""
    monkeypatch.setattr(text_process_jobs.marshal, "loads", lambda _: pytest.fail("it came back"))
    aside = BoundedJson(60, 1)
    try:
        with pytest.raises(RequestError, match="at most 4 are taken") as caught:
            asyncio.run(aside.parse(json.dumps({"prompt": [[5]] * 5}).encode(), Bounds(entries={"prompt": 4})))
        assert caught.value.field == "prompt"
        with pytest.raises(BodyError, match="more than 9 values"):
            asyncio.run(aside.parse(json.dumps({"prompt": [5] * 20}).encode(), Bounds(values=9)))
    finally:
        aside.stop()


@pytest.mark.parametrize(
    ("source", "says"), [("{% for x in %}", "not valid jinja2"), ("{{ 'x' * 10**11 }}", "256 MiB of memory")]
)
def test_a_template_that_cannot_be_used_is_an_error_at_the_start(source, says):
    """It is compiled in the process too: constants are computed then, here more of them than any memory holds."""
    template = BoundedTemplate(TemplateSources(source), seconds=5, queue=1)
    try:
        with pytest.raises(ModelConfigError, match=says):
            template.check()
    finally:
        template.stop()


def test_a_model_without_a_template_is_told_of_when_it_is_read(tmp_path, caplog):
    """Not by the first conversation alone; and nothing is said of one that has a template."""
    caplog.set_level("INFO")
    directory = tiny_models.write_tiny("llama", tmp_path / "m")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    for template in (True, False):
        if not template:
            del config["chat_template"]
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
        model = ServedModel(directory, ServerSettings())
        model._read_text("generate", directory)
        assert (model.chat_template is not None) == template
        assert [record.message[:16] for record in caplog.records] == ([] if template else ["no chat template"])
