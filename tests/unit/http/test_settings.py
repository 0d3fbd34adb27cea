"""Settings: three sources, one precedence, no secret in any text."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nxd_infer.util.options import command_options, declared, table
from nxd_server.api_keys import read_keys
from nxd_server.errors import SettingsError
from nxd_server.settings import OTHERS, ServerSettings, unknown_variables
from tests.support.e2e.command import ROOT, here, refused


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch):
    for name in list(os.environ):
        if name.startswith("NXD_"):
            monkeypatch.delenv(name)


def test_variables_that_are_no_setting():
    fine = {"NXD_INFER_PORT": "1", "nxd_infer_host": "h", "NXD_INFER_API_KEY": "k", "NXD_INFER_CACHE": "/x"}
    fine |= {f"NXD_INFER_{name}": "1" for name in OTHERS}
    wrong = {"NXD_INFER_APIKEYS": "secret", "NXD_INFER_ZZZ": "1"}
    assert unknown_variables({**fine, **wrong}) == [
        "NXD_INFER_APIKEYS is not a setting of the server; did you mean NXD_INFER_API_KEYS?",
        "NXD_INFER_ZZZ is not a setting of the server",
    ]


def test_the_librarys_own_variables_are_known_to_the_server():
    """Else it would warn of each; one that is no setting's name, and that no setting may get."""
    folders = ("nxd_infer", "bench", "deploy")
    read = {
        name
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".sh")
        for name in re.findall(r"\bNXD_INFER_([A-Z_]+)\b", path.read_text())
    }
    settings = {name.upper() for name in declared(ServerSettings)}
    assert {"CACHE", "PIN", "CPU_LEVEL"} <= read
    assert read - settings == set(OTHERS) and not settings & set(OTHERS)
    told = re.findall(r"^\| `NXD_INFER_([A-Z_]+)` \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(OTHERS)


def test_serve_has_an_option_for_each_setting_and_takes_what_it_is_given(monkeypatch):
    seen = []
    monkeypatch.setattr("nxd_server.app.run.serve", lambda artifact, settings: seen.append(settings) or 0)
    shown = here("serve", "--help").out
    options = command_options(ServerSettings)
    for option in options.values():
        flags = (option.flag or "?").split("/")
        assert all(re.search(rf"(?<![\w-]){flag}(?![\w-])", shown) for flag in flags), flags
        assert option.group in shown
    assert set(options) == set(declared(ServerSettings))
    given = ("--port", 1, "--api-key", "a", "--api-key", "b", "--no-access-log", "--no-kernel", "--log-format", "json")
    assert here("serve", "artifact", *given).status == 0
    (settings,) = seen
    assert settings.port == 1 and settings.api_keys == ["a", "b"] and settings.log_format == "json"
    assert not settings.access_log and not settings.allow_kernel


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--log-format", "xml"), ("--log-format", "xml", "json")),
        (("--request-timeout", 0), ("--request-timeout", "a number of seconds above 0, at most 86400, got 0")),
        (("--keys", "a"), ("--keys",)),
    ],
)
def test_a_wrong_option_is_named(arguments, words):
    refused(here("serve", "artifact", *arguments), *words)


def test_arguments_beat_the_environment_and_that_beats_the_file(tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    (tmp_path / "server.json").write_text('{"port": 1, "host": "h1", "drain-timeout": 1, "api_keys": ["k"]}')
    (tmp_path / "server.yaml").write_text("port: 1\nhost: h1\ndrain-timeout: 1\napi_keys: [k]\n")
    monkeypatch.setenv("NXD_INFER_PORT", "2")
    monkeypatch.setenv("NXD_INFER_HOST", "h2")
    for name in ("server.json", "server.yaml"):
        settings = ServerSettings.resolve(tmp_path / name, port=3, host=None, api_keys=[])
        assert (settings.port, settings.host, settings.drain_timeout) == (3, "h2", 1.0)
        assert settings.api_keys == ["k"]
    assert ServerSettings.resolve().port == 2


@pytest.mark.parametrize(
    ("value", "keys"),
    [("a,b", ["a", "b"]), (" a ", ["a"]), ('["a", "b,c"]', ["a", "b,c"]), ("ü", ["ü"]), ("", [])],
)
def test_keys_from_the_environment(monkeypatch, value, keys):
    monkeypatch.setenv("NXD_INFER_API_KEYS", value)
    assert ServerSettings.resolve().api_keys == keys


def test_keys_that_are_none_do_not_open_the_server(monkeypatch, tmp_path):
    (tmp_path / "keys").write_text("\n \n")
    with pytest.raises(SettingsError, match="no key"):
        read_keys(ServerSettings.resolve(api_keys_file=str(tmp_path / "keys")))
    monkeypatch.setenv("NXD_INFER_API_KEYS", " , ")
    with pytest.raises(SettingsError, match="holds no key"):
        ServerSettings.resolve()


def test_a_single_key_under_the_likely_name_closes_the_server(monkeypatch):
    monkeypatch.setenv("NXD_INFER_API_KEY", "one")
    assert ServerSettings.resolve().api_keys == ["one"]
    assert ServerSettings.resolve(api_keys=["two"]).api_keys == ["two"]


def test_texts_are_read_as_what_they_stand_for(monkeypatch):
    texts = {"PORT": " 7 ", "ACCESS_LOG": "off", "CALL_TIMEOUT": "1e1", "KEEP": "a", "LORA": "a=b, c=d"}
    for name, text in texts.items():
        monkeypatch.setenv(f"NXD_INFER_{name}", text)
    found = ServerSettings.resolve()
    assert (found.port, found.access_log, found.call_timeout) == (7, False, 10.0)
    assert (found.keep, found.lora) == (Path("a"), ["a=b", "c=d"])


def test_no_secret_is_ever_shown(tmp_path, monkeypatch):
    settings = ServerSettings.resolve(api_keys=["hunter2"])
    assert "hunter2" not in repr(settings) + str(settings)
    monkeypatch.setenv("NXD_INFER_API_KEYS", '["hunter2", ""]')
    monkeypatch.setenv("NXD_INFER_PORT", "x")
    with pytest.raises(SettingsError) as caught:
        ServerSettings.resolve()
    assert "hunter2" not in str(caught.value) and "port" in str(caught.value) and "api_keys" in str(caught.value)
    assert caught.value.__suppress_context__
    file = tmp_path / "bad.json"
    file.write_text('{"api_keys": ["hunter2",]')
    with pytest.raises(SettingsError) as caught:
        ServerSettings.resolve(file)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"port": 65536}, "port"), ({"drain_timeout": -1}, "drain_timeout"),
        ({"prot": 1}, "no server setting is named 'prot'; did you mean port?"), ({"api_keys": [""]}, "api_keys"),
        ({"api_keys": '["a"'}, "api_keys"),
        ({"request_timeout": float("nan")}, "request_timeout"), ({"drain_timeout": float("inf")}, "drain_timeout"),
        ({"admin_key": " "}, "admin_key"), ({"weights_root": "/no/such/folder"}, "weights_root"),
        ({"weights_drain_timeout": 0}, "must be a number of seconds above 0, at most 86400, got 0"),
        ({"max_choices": True}, "max_choices must be a whole number of at least 1, got True"),
        ({"log_level": "warnin"}, "\"warning\" or \"error\", got 'warnin'; did you mean warning"),
        ({"access_log": "maybe"}, "access_log must be True or False, got 'maybe'"),
        ({"host": ""}, "host is empty"), ({"lora": "a"}, "lora: 'a' is not NAME=PATH"),
        ({"api_keys": [7]}, "api_keys holds something that is not a text$"), ({"api_keys": 7}, "comma-separated text$"),
        ({"port": -1, "max_restarts": "x"}, "^invalid server settings: port must .*; max_restarts must .* got 'x'$"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(arguments, word):
    with pytest.raises(SettingsError, match=word):
        ServerSettings.resolve(**arguments)


@pytest.mark.parametrize("name", [name for name, one in declared(ServerSettings).items() if one.unit == "seconds"])
def test_a_time_that_no_wait_takes_is_named(name):
    with pytest.raises(SettingsError, match=rf"{name} must be .* seconds .*(at most|to) \d+, "):
        ServerSettings.resolve(**{name: 10**10})


@pytest.mark.parametrize("text", ["[1]", '{"nope": 1}', "{", '"x"'])
def test_a_wrong_file_is_named(tmp_path, text):
    file = tmp_path / "server.json"
    file.write_text(text)
    with pytest.raises(SettingsError):
        ServerSettings.resolve(file)
    with pytest.raises(SettingsError, match=r"missing\.yaml' cannot be read: No such file or directory$"):
        ServerSettings.resolve(tmp_path / "missing.yaml")
    with pytest.raises(SettingsError, match=r"\.toml"):
        (tmp_path / "a.toml").write_text("")
        ServerSettings.resolve(tmp_path / "a.toml")


def test_the_admin_key_is_a_secret_and_no_other_key(monkeypatch):
    monkeypatch.setenv("NXD_INFER_ADMIN_KEY", "hunter2 ")
    settings = ServerSettings.resolve(api_keys=["user"])
    assert settings.admin() == b"hunter2" and settings.api_keys == ["user"]
    assert "hunter2" not in repr(settings) and ServerSettings.resolve(admin_key="other").admin() == b"other"
    with pytest.raises(SettingsError, match="admin_key is one of api_keys"):
        read_keys(ServerSettings.resolve(api_keys=["hunter2"]))


def test_the_documentation_lists_every_setting_with_its_default_and_meaning():
    assert table(ServerSettings, "setting", python=False) in (ROOT / "docs/settings.md").read_text()
