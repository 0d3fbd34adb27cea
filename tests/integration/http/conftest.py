"""One server of each kind for all tests that only ask it something."""

from __future__ import annotations

import pytest

from tests.support.http.http_servers import toy_server


@pytest.fixture(scope="session")
def toy():
    """A ready toy server: 4 slots, 64 positions, no keys. A template may take a minute."""
    with toy_server(access_log=False, render_timeout=60) as server:
        yield server


@pytest.fixture(scope="session")
def slow_toy():
    """As ``toy``, but every step takes 30 ms and a request may be 8000 tokens long, which ends by itself in minutes."""
    with toy_server(toy={"delay": 0.03, "max_len": 8000}, keep_alive_interval=0.5) as server:
        yield server


@pytest.fixture(scope="session")
def llama():
    """The artifact of a tiny Llama on two ranks: batches of 1 and 4, prompts of 16, 256 positions."""
    from tests.support.http.http_artifacts import LLAMA, trace_tiny  # which imports torch

    return trace_tiny("llama", "generate", **LLAMA)


@pytest.fixture(scope="session")
def llama_texts(llama):
    """What transformers' own model answers to each of PROMPTS."""
    from tests.support.http.http_artifacts import PROMPTS, greedy_texts
    from tests.support.http.load import TOKENS

    return greedy_texts(llama.parent / "model", PROMPTS, TOKENS)


@pytest.fixture(scope="session")
def real_llama(llama):
    from tests.support.http.http_artifacts import real_server

    with real_server(llama) as server:
        yield server


@pytest.fixture(scope="session")
def real_client(real_llama):
    import openai

    with openai.OpenAI(base_url=real_llama.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer():
    from tests.support.http.http_toy import toy_tokenizer

    return toy_tokenizer()


@pytest.fixture(scope="session")
def expect(tokenizer):
    """``expect(prompt, **options)``: ids, text and finish reason that the toy model must give."""
    from tests.support.engine.toy_model import EOS, naive_generate

    def answer(prompt, **options):
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = naive_generate(ids, max_len=64, **options)
        stopped = tokens[-1] in EOS and not options.get("ignore_eos")
        text = tokenizer.decode(tokens[:-1] if stopped else tokens)
        return tokens, text, "stop" if stopped else "length"

    return answer
