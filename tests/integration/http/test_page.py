"""The page's files as the server gives them out; what they do in a browser is tested by `make test-page`."""

from __future__ import annotations

import re

import pytest

from nxd_server.http.page.files import FILES, TYPES
from tests.support.http.http_servers import is_error, toy_server

TEXTS = {path: file.read_text() for path, file in FILES.items()}


@pytest.fixture(scope="module")
def locked():
    with toy_server(api_keys=["secret"], access_log=False) as server:
        yield server


@pytest.mark.smoke
def test_every_file_needs_no_key_and_lets_nothing_of_another_site_in(locked):
    for path, file in FILES.items():
        answer = locked.get(path)
        assert (answer.status_code, answer.content) == (200, file.read_bytes()), path
        assert answer.headers["content-type"] == f"{TYPES[file.suffix]}; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-cache"
        again = locked.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert locked.post(path, {}).status_code == 401  # in the shape of the route's API
    is_error(locked.get("/v1/models"), 401)
    is_error(locked.get("/page/files.py"), 401)


def test_nothing_comes_from_outside_or_stands_within():
    named = {
        "/",
        "/docs",
        *(f"/page/{name}" for name in re.findall(r'"(?:page|\.)/([\w.]+)"', "".join(TEXTS.values()))),
    }
    assert named == set(FILES), "files that nobody asks for, or that are not there"
    for path, text in TEXTS.items():
        assert set(re.findall(r"\w+://[^\"' ]*", text)) <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"@import|url\(|\beval\b|innerHTML|insertAdjacentHTML", text), path
        assert max(map(len, text.splitlines())) <= 120, path
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", TEXTS["/"])


def test_a_server_without_the_page():
    with toy_server(page=False) as server:
        is_error(server.get("/"), 405)  # what TGI's clients post to
        is_error(server.get("/page/main.js"), 404)


def test_below_a_prefix_its_addresses_stay_below_it():
    with toy_server(root_path="/models/a") as server:
        whole = server.get("/models/a/")
        assert whole.content == FILES["/"].read_bytes() and server.get("/models/a/page/main.js").status_code == 200
        alone = server.get("/models/a?b=1")
        assert (alone.status_code, alone.headers["location"]) == (308, "a/")
    assert not [text for text in TEXTS.values() if re.search(r'(href|src|fetch|ask|send|stream)\W+"?/\w', text)]
