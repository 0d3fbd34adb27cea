"""Clients that ask a real server without a pause, and know every answer."""

from __future__ import annotations

import itertools
import threading
import time

import httpx

from tests.support.http.http_artifacts import PROMPTS
from tests.support.http.http_servers import events_of

COMPLETIONS = "/v1/completions"
TOKENS = 4


def body_of(prompt, **more):
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}


def rank_pids(server):
    return [rank["pid"] for rank in server.get("/health").json()["ranks"]]


class Load:
    """Six clients, and what they saw. Whatever they ask ends in one of the five lists."""

    def __init__(self, server, *texts, clients=6, timeout=600, **fields):
        """``texts``: what greedy answers are, by prompt; after swaps, by the version of the weights before.
        ``timeout``: seconds that an answer may take; ``fields``: of each request, in place of the usual ones."""
        self.server, self.texts, self.timeout, self.fields = server, texts, timeout, fields
        self.answers, self.refused, self.cut, self.wrong, self.lost = [], [], [], [], []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request was never answered"

    def _work(self, number):
        for turn in itertools.count(number):
            if self._stop.is_set():
                return
            prompt = PROMPTS[turn * 3 % len(PROMPTS)]
            body = {**body_of(prompt, stream=turn % 2 == 0), **self.fields}
            try:
                response = self.server.post(COMPLETIONS, body, timeout=self.timeout)
            except httpx.TransportError as error:
                self.lost.append(repr(error))
                time.sleep(0.05)
                continue
            self._note(prompt, body["stream"], response)

    def _note(self, prompt, stream, response):
        if response.status_code != 200:
            (self.refused if response.status_code == 503 else self.wrong).append(response.status_code)
            time.sleep(0.02)
            return
        if not stream:
            answer = response.json()
            text, version = answer["choices"][0]["text"], answer["weight_version"]
        else:
            events = events_of(response.text)
            if events[-1] != "[DONE]":
                assert "error" in events[-1] and '"finish_reason":"' not in response.text
                self.cut.append(events[-1]["error"])
                return
            text, version = "".join(event["choices"][0]["text"] for event in events[:-1]), events[0]["weight_version"]
        (self.answers if text == self.texts[version][prompt] else self.wrong).append((prompt, text))
