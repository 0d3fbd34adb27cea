"""Whatever a body holds, the answer is 200 or a refusal in OpenAI's shape, and the server serves the next one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxd_server.http.openai.schemas import ChatBody, CompletionBody
from nxd_server.http.tokenize import TokenizeBody
from tests.support.http.http_servers import events_of, http_request, is_error, raw, read_all
from tests.support.http.json_values import values

GOOD = {"max_tokens": 3, "temperature": 0}
HELLO = [{"role": "user", "content": "hello"}]
quick = settings(max_examples=20, suppress_health_check=list(HealthCheck))
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]) | values},
        optional={"content": values, "name": values, "tool_calls": values},
    ),
    max_size=3,
)


ROUTES = {
    "/v1/completions": (CompletionBody, "prompt", st.just("hello") | values),
    "/v1/chat/completions": (ChatBody, "messages", st.just(HELLO) | values | messages),
    "/tokenize": (TokenizeBody, "prompt", st.just("hello") | values),
}


def check(response):
    if response.status_code == 404:
        is_error(response, 404, "model", "model_not_found")
    elif response.status_code != 200:
        is_error(response, 400)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert events_of(response.text)[-1] == "[DONE]"
    else:
        assert response.json()


@pytest.mark.parametrize("route", ROUTES)
@quick
@given(data=st.data())
def test_bodies(toy, route, data):
    kind, subject, subjects = ROUTES[route]
    names = sorted({*kind.model_fields, *kind.NEUTRAL, *kind.HARMLESS} - {"prompt", "messages"})
    good = GOOD if kind is not TokenizeBody else {}
    more = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    check(toy.post(route, {**good, **more, subject: data.draw(subjects)}))


@quick
@given(data=st.binary(max_size=40))
def test_bytes_that_are_no_json(toy, data):
    check(toy.post("/detokenize", content=data))
    check(toy.post("/invocations", content=b'{"prompt": "' + data))


@quick
@given(data=st.binary(min_size=1, max_size=60), place=st.integers(0, 80))
def test_bytes_that_are_no_http(toy, data, place):
    """A request with random bytes somewhere in it is answered with some status, or closed; never a defect."""
    good = http_request("/tokenize", b'{"prompt": "a"}', "Connection: close")
    with raw(toy, good[:place] + data + good[place:]) as connection:
        connection.shutdown(1)
        answer = read_all(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in answer[:20]


def test_the_server_is_as_before(toy, expect):
    answer = toy.post("/v1/completions", {**GOOD, "prompt": "hello"}).json()
    assert answer["choices"][0]["text"] == expect("hello", max_tokens=3)[1]
    assert toy.metric("nxd_num_requests_running") == 0 and toy.metric("nxd_slots_free") == 4
    assert "Traceback" not in toy.log
    assert toy.metric("nxd_http_requests_total", status="500") == 0
