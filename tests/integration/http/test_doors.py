"""Who comes in: pages of other origins, names of elsewhere, TLS, prefixes of a proxy, slashes at the end."""

from __future__ import annotations

import re
import ssl
import subprocess

import httpx
import openai
import pytest

from nxd_server.errors import SettingsError
from nxd_server.http.certificate import certificate_of
from nxd_server.settings import ServerSettings
from tests.support.http.http_servers import events_of, is_error, toy_server, wait_for

COMPLETIONS = "/v1/completions"
HELLO = {"prompt": "hello", "max_tokens": 2, "temperature": 0}
PAGE = "https://chat.example.org"
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, None),  # no browser
        ({"sec-fetch-mode": "cors"}, None),  # node
        ({"origin": "http://{host}"}, None),  # a browser that trusts no http
        ({"origin": "http://{host}", "sec-fetch-site": "same-origin"}, None),
        ({"origin": PAGE, "sec-fetch-site": "same-origin"}, None),  # a proxy has another name
        ({"origin": PAGE}, "foreign_origin"),
        ({"origin": "http://localhost:1"}, "foreign_origin"),
        ({"origin": "null"}, "foreign_origin"),
        ({"origin": "http://localhost:1", "sec-fetch-site": "same-site"}, "foreign_origin"),
        ({"sec-fetch-site": "cross-site"}, "foreign_origin"),
        (LINK, "foreign_origin"),  # a form
        ({"host": "localhost"}, None),
        ({"host": "192.168.1.7:8000"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"host": "nxd.localhost"}, None),
        ({"host": "evil.example", "origin": "http://evil.example"}, "foreign_host"),  # whose name leads to this machine
        ({"host": "127.0.0.1.evil.example:8000"}, "foreign_host"),
    ],
)
def test_a_page_of_another_origin_is_refused(toy, headers, code):
    headers = {name: value.format(host=f"127.0.0.1:{toy.port}") for name, value in headers.items()}
    answer = toy.post(COMPLETIONS, HELLO, headers=headers)
    if code is None:
        assert answer.status_code == 200
    else:
        assert "--allowed-origin" in is_error(answer, 403, code=code)["message"]
    assert "access-control-allow-origin" not in answer.headers
    if headers == LINK:
        assert toy.get("/v1/models", headers=LINK).status_code == 200  # which its user follows, and sees


def test_a_browser_asks_before_it_sends_json_and_text_is_not_json(toy):
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    is_error(toy._client.options(toy.url + COMPLETIONS, headers=asks), 403, code="foreign_origin")
    for kind in ("text/plain", "Text/Plain;charset=UTF-8", "multipart/form-data; boundary=x"):
        answer = toy.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind})
        is_error(answer, 415, code="not_json")


def test_allowed_origins_may_ask():
    keyed = {"authorization": "Bearer k", "origin": PAGE, "sec-fetch-site": "cross-site"}
    with toy_server(allowed_origins=[PAGE], api_keys=["k"]) as server:
        asks = {"origin": PAGE, "access-control-request-method": "POST"}
        asks["access-control-request-headers"] = "authorization,content-type"
        answer = server._client.options(server.url + COMPLETIONS, headers=asks)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in answer.headers["access-control-allow-headers"]
        for headers, status in ((keyed, 200), ({**keyed, "authorization": "Bearer no"}, 401)):
            answer = server.post(COMPLETIONS, HELLO, headers=headers)
            assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        is_error(server.post(COMPLETIONS, HELLO, headers={**keyed, "origin": PAGE + ".evil.example"}), 403)
        rebound = {"authorization": "Bearer k", "host": "llm.example.org"}  # a page does not know the key
        assert server.post(COMPLETIONS, HELLO, headers=rebound).status_code == 200
    with toy_server(allowed_origins=["*"]) as server:
        answer = server.post(COMPLETIONS, HELLO, headers={"origin": PAGE, "host": "llm.example.org"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


def test_a_root_path_slashes_at_the_end_and_a_trusted_proxy():
    prefixed = {"root_path": "/llm", "forwarded_allow_ips": ["127.0.0.0/8"], "api_keys": ["k"]}
    with toy_server(**prefixed) as server:
        key = {"x-api-key": "k", "x-forwarded-for": "8.8.8.8", "x-forwarded-proto": "https"}
        for path in ("/v1/models", "/llm/v1/models", "/llm/v1/models/", "/v1/models//", "/llm/docs", "/docs/"):
            assert server.get(path, headers=key).status_code == 200, path
        for path in ("/llm/v1/completions/", "/v1/completions/", "/v1/completions"):
            assert server.post(path, HELLO, headers=key).status_code == 200, path
        assert server.get("/llm/livez/").status_code == server.get("/docs").status_code == 200
        is_error(server.get("/llm/v1/models"), 401)
        for other in ("/llms/v1/models", "/llm/llm/v1/models", "/llm/llm/metrics"):
            is_error(server.get(other, headers=key), 404)
        assert server.get("/openapi.json", headers=key).json()["servers"] == [{"url": "/llm"}]
        wait_for(lambda: "8.8.8.8" in server.log)


def certificate(folder, name, *more):
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    files = folder / f"{name}.crt", folder / f"{name}.key"
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")
    named = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
    to = ("-out", files[0], "-keyout", files[1], *(more or ("-nodes",)))
    subprocess.run([*made, *named, *to], check=True, capture_output=True, timeout=60)
    return files


@pytest.mark.smoke
def test_tls_whose_certificate_is_replaced_while_it_serves(tmp_path):
    first, key = certificate(tmp_path, "first", "-passout", "pass:secret-word")
    second, other_key = certificate(tmp_path, "second", "-passout", "pass:secret-word")
    files = {"ssl_certfile": str(first), "ssl_keyfile": str(key)}
    env = {"NXD_INFER_SSL_KEYFILE_PASSWORD": "secret-word"}
    trusted = ssl.create_default_context(cafile=str(first))
    with toy_server(**files, env=env) as server, httpx.Client(verify=trusted) as kept:
        assert server.url.startswith("https://")
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", http_client=kept)
        assert client.completions.create(model="toy", **HELLO).choices[0].text
        assert events_of(server.post(COMPLETIONS, {**HELLO, "stream": True}).text)[-1] == "[DONE]"
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/livez", timeout=60)

        def served():
            return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=60).strip()

        before = first.read_text().strip()
        first.write_text(second.read_text())  # half of the new pair
        wait_for(lambda: "the former certificate stays in use" in server.log)
        assert served() == before
        key.write_text(other_key.read_text())
        wait_for(lambda: served() == second.read_text().strip())
        assert kept.get(server.url + "/livez").status_code == 200  # on the connection that it had
        assert server.stop() == 0 and "secret-word" not in server.log


def test_certificates_that_cannot_be_used_are_refused(tmp_path):
    chain, key = certificate(tmp_path, "one", "-passout", "pass:x")
    other, _ = certificate(tmp_path, "other")
    for given, words in {
        (chain, None, None): "ssl_keyfile is missing",
        (None, key, None): "ssl_certfile is missing",
        (tmp_path / "no", key, None): f"ssl_certfile '{tmp_path}/no' cannot be read",
        (chain, key, None): "ssl_keyfile_password",
        (chain, key, "secret"): "ssl_keyfile_password",
        (other, key, "x"): "KEY_VALUES_MISMATCH",
    }.items():
        settings = ServerSettings(
            **dict(zip(("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"), given, strict=True))
        )
        with pytest.raises(SettingsError, match=re.escape(words)) as caught:
            certificate_of(settings)
        assert "secret'" not in str(caught.value)
    for name, value in {
        "allowed_origins": "https://a.example/path",
        "forwarded_allow_ips": "10.0.0.1/8",
        "root_path": "/v1",
    }.items():
        with pytest.raises(SettingsError, match=name):
            ServerSettings(**{name: value})
