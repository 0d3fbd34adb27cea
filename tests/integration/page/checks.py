"""The page in Debian's Chromium, on real servers: `make test-page`, which `make test` leaves out.

The screenshots of the documents are made here: `make test-page IMAGES=docs/images` keeps them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from axe_playwright_python.base import AXE_SCRIPT as AXE
from playwright.sync_api import Browser, Page, expect, sync_playwright

from nxd_infer.cli.demo import smollm2
from nxd_infer.util.ports import free_port
from tests.support.http.http_artifacts import real_server, trace_tiny
from tests.support.http.http_servers import ServerProcess, toy_server
from tests.support.http.taught_model import VERDICT, taught_artifact

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1180, "height": 860}
PATIENT = 60_000
CHAT = "Will it rain?"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator:
    """``opened(url, **context)``: the page there. It asks no other site for anything and logs no error but for an
    answer that it shows."""
    contexts, own, asked, errors = [], set(), set(), []

    def see(url: str, **options) -> Page:
        context = browser.new_context(**{"viewport": DESK, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENT)
        page.on("request", lambda request: asked.add(httpx.URL(request.url).netloc))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        own.add(httpx.URL(url).netloc)
        page.goto(url)
        return page

    yield see
    for context in contexts:
        context.close()
    assert asked <= own, "it asks another site"
    assert not [line for line in errors if "Failed to load resource" not in line], errors


@pytest.fixture(scope="session")
def taught() -> Iterator[ServerProcess]:
    """A tiny model that calls tools, thinks and answers."""
    with real_server(taught_artifact()) as server:
        yield server


def field(page: Page, label: str):
    """The field of the view that is shown."""
    return page.locator("section:not([hidden])").get_by_label(label, exact=True)


def say(page: Page, text: str) -> None:
    field(page, "Message").fill(text)
    field(page, "Message").press("Enter")


def ended(page: Page, number: int = 1):
    """The last answer, once there are so many and it is over."""
    expect(page.locator(".answer .figures").filter(has_text=re.compile("."))).to_have_count(number, timeout=PATIENT)
    return page.locator(".answer").last


def test_a_conversation_with_reasoning_and_probabilities(taught, opened):
    page = opened(taught.url)
    field(page, "temperature").fill("0")
    say(page, "Rain?")
    answer = ended(page)
    assert answer.locator(".text").inner_text() == "No idea."
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first token after \d+ ms · ended by stop", answer.inner_text())
    page.get_by_role("button", name="New conversation").click()
    field(page, "Probabilities of tokens").check()
    say(page, "Why?")
    answer = ended(page)
    assert answer.locator("details p").inner_text().strip() == "Hm."
    tokens = answer.locator("[role=group] span")
    assert "".join(tokens.all_inner_texts()).endswith("So.")
    tokens.last.hover()
    expect(answer.get_by_role("status")).to_contain_text(re.compile(r'"\." \d+\.\d %'))
    answer.get_by_role("group", name="Tokens").press("ArrowLeft")
    expect(answer.get_by_role("status").locator("tr")).to_have_count(5)
    field(page, "Other fields, as JSON").fill('{"temperature": 9}')
    say(page, "Why?")
    expect(page.get_by_role("alert").filter(has_text="temperature")).to_be_visible()


def test_a_tool_is_called_and_its_result_read(taught, opened):
    page = opened(taught.url)
    field(page, "temperature").fill("0")
    field(page, "Tools").select_option("required")
    say(page, "Rain?")
    call = ended(page).locator(".call").inner_text()
    name, given = re.fullmatch(r"(\w+)\((.*)\)", call, re.DOTALL).groups()
    assert name == "weather" and set(json.loads(given)) == {"city"}
    field(page, "Tools").select_option("")
    field(page, "Result of weather").fill("dry")
    page.get_by_role("button", name="Send results").click()
    assert ended(page, 2).locator(".text").inner_text()


def test_an_answer_is_json_of_a_schema(taught, opened):
    page = opened(taught.url)
    field(page, "Answer").select_option("json_schema")
    field(page, "Schema").fill(json.dumps(VERDICT))
    say(page, CHAT)
    answer = ended(page)
    assert set(json.loads(answer.locator(".text").inner_text())) == {"ok"} and "valid JSON" in answer.inner_text()
    field(page, "Schema").fill("{")
    say(page, CHAT)
    expect(page.get_by_role("alert").filter(has_text="schema: not JSON")).to_be_visible()


def test_a_completion_and_its_probabilities(taught, opened):
    page = opened(taught.url + "/#complete")
    field(page, "Probabilities of tokens").check()
    field(page, "temperature").fill("0")
    field(page, "Prompt").fill("The way")
    field(page, "Prompt").press("Control+Enter")
    answer = ended(page)
    body = {"prompt": "The way", "temperature": 0, "logprobs": 5}
    parts = taught.post("/v1/completions", body).json()["choices"][0]
    tokens = answer.locator("[role=group] span")
    assert "".join(tokens.all_text_contents()).rstrip("�") == parts["text"].rstrip("�")
    tokens.first.hover()
    percent = f"{100 * np.exp(parts['logprobs']['token_logprobs'][0]):.1f} %"
    expect(answer.get_by_role("status").locator("caption")).to_contain_text(percent)


def test_a_key_that_is_missing_or_wrong_is_said(opened):
    with toy_server(api_keys=["geheim-ü"]) as server:
        page = opened(server.url)
        expect(page.get_by_role("alert")).to_have_text("This server needs an API key.")
        for key, said in (("other", "The server refused this API key."), ("geheim-ü", "")):
            page.get_by_label("API key").fill(key)
            page.get_by_label("API key").press("Enter")
            expect(page.locator("#notice")).to_have_text(said)
        say(page, "hello")
        ended(page)
        page.reload()
        expect(page.get_by_label("Model")).to_have_value("toy")
        assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0


def test_the_routes_are_at_docs(opened):
    with toy_server(api_keys=["one"]) as server:
        page = opened(server.url + "/docs")
        expect(page.locator("#notice")).to_have_text("This server needs an API key.")
        page.get_by_label("API key").fill("one")
        page.get_by_label("API key").press("Enter")
        page.locator("summary", has_text="POST /v1/completions").click()
        form = page.get_by_role("table", name="POST /v1/completions").get_by_role("row", name="Body application/json")
        expect(form).to_contain_text("CompletionBody")
        page.get_by_role("link", name="Chat").click()
        expect(field(page, "Message")).to_be_visible()


def test_below_a_prefix(opened):
    with toy_server(root_path="/models/a") as server:
        page = opened(server.url + "/models/a#chat")
        say(page, "hello")
        assert ended(page).locator(".text").inner_text()


def test_a_server_that_restarts_is_shown_and_found_again(opened):
    port = free_port()
    with toy_server(port=port, toy={"delay": 0.05, "max_len": 4000}) as server:
        page = opened(server.url)
        say(page, "hello")
        expect(page.locator(".answer .text")).not_to_be_empty()
        server.kill()
        expect(page.locator("#state")).to_have_text("the server cannot be reached")
        expect(page.locator(".answer .error")).to_be_visible()
    with toy_server(port=port, wait=False) as server:
        field(page, "Message").fill("typed meanwhile")
        expect(page.locator("#state")).to_contain_text("ready; restarted at")
        assert field(page, "Message").input_value() == "typed meanwhile"
        page.get_by_role("button", name="Try again").click()
        assert ended(page).locator(".text").inner_text()
        assert server.process.poll() is None


def test_the_plots_say_what_the_metrics_say(opened):
    with toy_server(toy={"delay": 0.02}) as server:
        page = opened(server.url + "/#server")
        body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
        for _ in range(4):
            server.post("/v1/completions", body)
        plots = page.locator("figure")
        expect(plots).to_have_count(8)
        tokens = page.locator("figure", has_text="Tokens per second")
        expect(tokens.locator(".line").first).to_have_attribute("d", re.compile("L"))
        expect(tokens.locator("svg")).to_have_attribute("aria-label", re.compile(r"generated [1-9][\d.]*"))
        tokens.locator("svg").hover()
        expect(tokens.locator(".cursor")).to_have_count(1)
        runs = f"{server.metric('nxd_bucket_executions_total', graph='decode_b2'):.0f}"
        row = page.get_by_role("row", name="decode_b2").locator("td")
        expect(row.nth(1)).to_have_text(runs, timeout=PATIENT)
        tokens.locator("svg").press("ArrowLeft")
        expect(tokens.locator("svg")).to_have_attribute("aria-label", re.compile(r" at|second \d\d:\d\d:\d\d"))


def test_quantiles_are_those_of_what_was_counted(opened, taught):
    """Against numpy's, within the width of a bucket."""
    page = opened(taught.url)
    times = np.random.default_rng(0).gamma(2, 0.05, 500)
    bounds = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    counts = [int((times <= bound).sum()) for bound in bounds]
    ask = "async ([q, bounds, counts]) => (await import('./page/metrics.js')).quantile(q, bounds, counts)"
    for q in (0.1, 0.5, 0.95):
        found, right = page.evaluate(ask, [q, bounds, counts]), np.quantile(times, q)
        place = np.searchsorted(bounds, right)
        assert bounds[place - 1] <= found <= bounds[place]
    assert page.evaluate(ask, [0.5, bounds, [0] * 7]) is None


@pytest.fixture(scope="session")
def sentences() -> Iterator[ServerProcess]:
    """A tiny encoder, whose cosines mean nothing."""
    shapes = {"batch_sizes": [4], "prompt_buckets": [16, 32]}
    with real_server(trace_tiny("bert", "embed", **shapes)) as server:
        yield server


def test_embeddings_are_compared_and_documents_ranked(sentences, opened):
    page = opened(sentences.url)
    texts = ["a", "the with", "class"]
    field(page, "Texts, one a line").fill("\n".join(texts))
    page.get_by_role("button", name="Compare").click()
    cells = page.get_by_role("table", name="Cosines").locator("tbody td")
    expect(cells).to_have_count(9)
    data = sentences.post("/v1/embeddings", {"input": texts}).json()["data"]
    vectors = np.array([one["embedding"] for one in data])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    shown = np.array(cells.all_inner_texts(), dtype=float).reshape(3, 3)
    assert np.allclose(shown, vectors @ vectors.T, atol=6e-4)
    page.get_by_role("link", name="Rank").click()
    field(page, "Query").fill("the")
    field(page, "Texts, one a line").fill("\n".join(texts))
    page.get_by_role("button", name="Rank").click()
    results = sentences.post("/v1/rerank", {"query": "the", "documents": texts}).json()["results"]
    rows = page.get_by_role("table", name="The best first").locator("tbody th")
    expect(rows).to_have_text([one["document"]["text"] for one in results])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(taught, opened, viewport, scheme):
    page = opened(taught.url, viewport=viewport, color_scheme=scheme)
    page.get_by_text("Parameters").first.wait_for()
    if viewport is PHONE:
        page.get_by_text("Parameters").first.click()
    field(page, "Probabilities of tokens").check()
    say(page, "Rain?")
    ended(page)
    for name in ("Chat", "Complete", "Server", "Routes"):
        page.get_by_role("link", name=name).click()
        expect(page.locator("section:not([hidden])")).to_have_attribute("aria-label", name)
        found = page.evaluate(AXE + "; axe.run()")
        assert [one["id"] for one in found["violations"]] == [], json.dumps(found["violations"], indent=1)[:4000]
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_pictures_of_a_model_that_answers(opened, tmp_path):
    """The documents' pictures. SmolLM2 is traced by the first such server on a machine, which keeps it."""
    images = Path(os.environ.get("IMAGES") or tmp_path)
    options = "--tp 2 --batch-sizes 1,4 --prompt-buckets 32,128 --max-len 512 --dtype bfloat16"
    gguf = smollm2.installed()
    assert gguf is not None
    with real_server(gguf, "--trace-options", options, "--served-model-name", "SmolLM2-135M") as server:
        page = opened(server.url, viewport={"width": 1100, "height": 560})
        field(page, "temperature").fill("0")
        field(page, "Probabilities of tokens").check()
        say(page, "What is the capital of France?")
        answer = ended(page)
        assert "Paris" in answer.locator(".text").inner_text()
        answer.locator("[role=group] span", has_text="The").first.hover()
        page.screenshot(path=images / "page-chat.png")
        end = time.monotonic() + 45
        with ThreadPoolExecutor() as pool:
            pool.map(lambda number: keep_asking(server, number, end), range(5))
            page.get_by_role("link", name="Server").click()
            page.set_viewport_size({"width": 1100, "height": 640})
            page.wait_for_timeout(40_000)
            page.locator("figure svg").first.hover()
            page.screenshot(path=images / "page-server.png")
    assert all((images / f"page-{name}.png").stat().st_size < 150_000 for name in ("chat", "server"))


def keep_asking(server: ServerProcess, number: int, end: float) -> None:
    while time.monotonic() < end:
        prompt = f"Once upon a time there were {number}"
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": 20 + 15 * number, "ignore_eos": True})
        time.sleep(number)
