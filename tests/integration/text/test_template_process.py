"""A chat template runs in a process of its own: it ends in time, leaves nothing behind, and is started when needed."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

from nxd_infer.errors import ModelConfigError
from nxd_server.app.service import Service
from nxd_server.errors import EngineUnavailableError, SettingsError
from nxd_server.settings import ServerSettings
from nxd_server.text import template_process as process
from nxd_server.text.chat_template import TemplateSources
from nxd_server.text.template_process import NICENESS, BoundedTemplate
from tests.support import tiny_models

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def slow_starts_are_waited_for(monkeypatch):
    monkeypatch.setattr(process, "START_SECONDS", 300.0)


@pytest.fixture
def template():
    template = BoundedTemplate(TemplateSources("{{ messages[0].content }}"), 60, 1)
    template.check()
    yield template
    template.stop()


def rendered(template):
    return asyncio.run(template.render(HELLO, {}, 9))


def test_it_leaves_streams_the_cores_and_outlives_what_is_sent_to_all_processes_of_the_server(template):
    pid = template.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    assert rendered(template) == "hello" and template.pid == pid


def test_a_client_that_leaves_when_its_answer_has_come_ends_no_job_of_the_next(template, monkeypatch):
    """Beside clients that left, six of a hundred conversations of another were a 400 for taking too much memory."""
    one, whole = process._Rendering(HELLO, {}, 9), template._answer

    def leave(connection, seconds):
        answer = whole(connection, seconds)
        template._cancel(one)
        return answer

    monkeypatch.setattr(template, "_answer", leave)
    assert template._run(one) == "hello"
    monkeypatch.setattr(template, "_answer", whole)
    assert rendered(template) == "hello"


def test_a_process_that_died_while_it_had_nothing_to_do_is_started_again(template):
    pid = template.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert rendered(template) == "hello" and template.pid not in (None, pid)


@pytest.mark.parametrize("use", [BoundedTemplate.check, rendered])
def test_where_no_process_starts_neither_the_request_nor_the_template_is_to_blame(monkeypatch, use):
    monkeypatch.setattr(process, "_CODE", "raise SystemExit(1)")
    with pytest.raises(EngineUnavailableError, match="did not start") as caught:
        use(BoundedTemplate(TemplateSources("{{ messages }}"), 60, 1))
    assert caught.value.state == "busy" and caught.value.retry_after


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


def read(directory, **settings) -> Service:
    service = Service(directory, ServerSettings(**settings))
    service._manifest = SimpleNamespace(metadata={"task": "generate"})  # pyright: ignore
    service._read_text(directory)  # pyright: ignore
    return service


def test_a_parser_of_tool_calls_needs_a_template_that_shows_tools(tmp_path):
    directory = tiny_models.write_tiny("llama", tmp_path / "m")
    with pytest.raises(SettingsError, match=r"tool_call_parser = 'hermes': .* takes no tools.*--chat-template"):
        read(directory, tool_call_parser="hermes")
    (tmp_path / "own.jinja").write_text("{{ tools }}{{ messages[0].content }}")
    service = read(directory, tool_call_parser="hermes", chat_template=str(tmp_path / "own.jinja"))
    assert service.tool_format == "hermes" and service.chat_template is not None
    with pytest.raises(ModelConfigError, match="chat_template = 'none' is no template"):
        read(directory, chat_template="none")


def test_a_model_without_a_template_is_told_of_when_it_is_read(tmp_path, caplog):
    """Not by the first conversation alone; and nothing is said of one that has a template."""
    caplog.set_level("INFO")
    directory = tiny_models.write_tiny("llama", tmp_path / "m")
    for has_template in (True, False):
        if not has_template:
            (directory / "chat_template.jinja").unlink()
        model = read(directory)
        assert (model.chat_template is not None) == has_template
        assert [record.message[:16] for record in caplog.records] == ([] if has_template else ["no chat template"])
