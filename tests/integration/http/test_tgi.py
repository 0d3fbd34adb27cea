"""text-generation-inference's routes, asked by Hugging Face's own client."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from huggingface_hub.errors import ValidationError

from tests.support.http.http_artifacts import PROMPTS
from tests.support.http.load import TOKENS


@pytest.fixture(scope="module")
def client(real_llama):
    return huggingface_hub.InferenceClient(model=real_llama.url, timeout=600)


@pytest.mark.smoke
def test_hugging_faces_client_completes_and_streams(client, llama_texts):
    for prompt in PROMPTS[:2]:
        text = llama_texts[prompt]
        assert client.text_generation(prompt, max_new_tokens=TOKENS) == text
        assert client.text_generation(prompt, max_new_tokens=TOKENS, return_full_text=True) == prompt + text
        assert "".join(client.text_generation(prompt, max_new_tokens=TOKENS, stream=True)) == text
    answer = client.text_generation("the 0", max_new_tokens=TOKENS, details=True, decoder_input_details=True)
    assert answer.generated_text == llama_texts["the 0"]
    details = answer.details
    assert (details.finish_reason, details.generated_tokens, len(details.tokens)) == ("length", TOKENS, TOKENS)
    assert details.prefill[0].logprob is None and all(one.logprob < 0 for one in details.prefill[1:])
    assert "".join(token.text for token in details.tokens) == answer.generated_text
    *events, last = client.text_generation("the 0", max_new_tokens=TOKENS, stream=True, details=True, top_n_tokens=2)
    assert [one.token.id for one in (*events, last)] == [token.id for token in details.tokens]
    assert (last.generated_text, last.details.finish_reason) == (llama_texts["the 0"], "length")
    assert all(one.generated_text is None and one.details is None for one in events)


def test_parameters_act(client, real_llama, llama_texts):
    text = llama_texts["the 0"]
    stop = text[1]
    answer = client.text_generation("the 0", max_new_tokens=TOKENS, stop=[stop], details=True)
    assert answer.generated_text == text[: text.index(stop) + 1] and answer.details.finish_reason == "stop_sequence"
    seeded = [client.text_generation("the 0", max_new_tokens=8, do_sample=True, seed=seed) for seed in (1, 1, 2, 3)]
    assert seeded[0] == seeded[1] and len(set(seeded)) > 1
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json", "value": schema}
    assert set(json.loads(client.text_generation("x", max_new_tokens=99, grammar=form))) == {"ok"}
    body = {"inputs": "the 0", "parameters": {"max_new_tokens": TOKENS}}
    assert real_llama.post("/generate", body).json() == {"generated_text": text}
    assert real_llama.post("/", body).json() == [{"generated_text": text}]
    for route, more in (("/generate_stream", {}), ("/", {"stream": True})):
        *_, last = (line for line in real_llama.post(route, {**body, **more}).text.split("\n\n") if line)
        assert json.loads(last.removeprefix("data:"))["generated_text"] == text
    short = real_llama.post("/generate", {"inputs": "x"})
    assert short.status_code == 200
    info = real_llama.get("/info").json()
    assert (info["model_id"], info["max_total_tokens"], info["router"]) == ("tiny-llama", 256, "nxd_infer")


def test_the_likeliest_of_several_samples_is_returned(client, real_llama):
    answer = client.text_generation("the 0", max_new_tokens=8, do_sample=True, seed=1, best_of=4, details=True)
    details = answer.details
    others = details.best_of_sequences
    assert len(others) == 3 and len({answer.generated_text, *(one.generated_text for one in others)}) > 1

    def likelihood(one):
        return sum(token.logprob for token in one.tokens) / len(one.tokens)

    assert likelihood(details) == max(map(likelihood, [details, *others]))
    assert "".join(token.text for token in details.tokens) == answer.generated_text
    parameters = {"max_new_tokens": 8, "do_sample": True, "seed": 1, "best_of": 4}
    assert real_llama.post("/generate", {"inputs": "the 0", "parameters": parameters}).json() == {
        "generated_text": answer.generated_text
    }
    streamed = real_llama.post("/generate_stream", {"inputs": "the 0", "parameters": parameters})
    assert streamed.status_code == 400 and "`parameters.best_of`" in streamed.json()["error"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"max_new_tokens": 9999}, "parameters.max_new_tokens"),
        ({"best_of": 2}, "parameters.best_of"),
        ({"best_of": 65, "do_sample": True}, "parameters.best_of = 65 are too many choices"),
        ({"top_n_tokens": 99}, "parameters.top_n_tokens"),
        ({"grammar": {"type": "xml", "value": {}}}, "parameters.grammar.type"),
        ({"moods": 1}, "moods"),
    ],
)
def test_errors_have_the_form_of_tgi(client, real_llama, given, name):
    answer = real_llama.post("/generate", {"inputs": "x", "parameters": given})
    assert answer.status_code == 400 and answer.json()["error_type"] == "validation"
    assert name in answer.json()["error"]
    if name == "parameters.max_new_tokens":
        with pytest.raises(ValidationError, match="max_new_tokens"):
            client.text_generation("x", **given)
