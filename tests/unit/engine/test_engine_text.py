"""Text out of the engine: whole characters, stop strings over token borders, text held back until it is certain."""

from __future__ import annotations

import json
import random
from unittest.mock import Mock

import pytest

from nxd_server.engine import Engine, SamplingParams
from nxd_server.engine.request import TokenEvent
from nxd_server.errors import GenerationError
from nxd_server.text.detokenize import TextStream
from nxd_server.text.tokenizer import Tokenizer, _byte_of_char
from tests.support.engine.asking import ask
from tests.support.engine.toy_model import EOS, VOCAB, Listener, ToyModel, naive_generate


def make_tokenizer():
    """One token a byte: letters, and the bytes of a few longer characters in pieces."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers

    chars = {byte: char for char, byte in _byte_of_char().items()}
    data = list(dict.fromkeys([*b"abcdefghijklmnopqrstuvwxyz .,!?", *"é你好世界😀".encode()]))
    while len(data) < VOCAB - 2:
        data.append(next(byte for byte in range(256) if byte not in data))
    pieces = [chars[byte] for byte in data]
    pieces = [*pieces[: EOS[0]], "<end>", "<stop>", *pieces[EOS[0] :]]
    raw = Raw(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(["<end>", "<stop>"])
    assert raw.get_vocab_size() == VOCAB
    return Tokenizer(raw, json.loads('{"eos_token": "<end>"}'))


@pytest.fixture(scope="module")
def engine():
    with Engine(ToyModel(max_len=256), make_tokenizer()) as engine:
        yield engine


def test_the_pieces_join_to_the_decoded_tokens(engine):
    for number in range(8):
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=number)
        result = ask(engine, [number], params)
        tokens = naive_generate([number], max_tokens=60, temperature=1.0, seed=number)
        assert result.tokens[0] == tokens
        stopped = tokens[-1] in EOS
        assert result.text[0] == engine.tokenizer.decode(tokens[:-1] if stopped else tokens)
        assert result.end.reason == ("stop" if stopped else "length")


def test_a_token_on_which_the_library_panics_fails_its_own_request_only():
    from tokenizers import decoders

    good, bad = (naive_generate(prompt, max_tokens=8, ignore_eos=True) for prompt in ([1, 2], [3, 4]))
    raw = make_tokenizer().raw
    text = next(raw.id_to_token(token) for token in bad[1:] if token not in (*good, *EOS))
    raw.decoder = decoders.Strip(text, 1, 1)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with Engine(ToyModel(), Tokenizer(raw)) as engine:
        failed = ask(engine, [3, 4], params)
        assert isinstance(failed.end.error, GenerationError) and "slice index" in str(failed.end.error)
        assert ask(engine, [1, 2], params).tokens[0] == good and engine.state == "ready"


def test_a_cancelled_text_that_cannot_be_completed_fails_its_own_request_only(monkeypatch):
    monkeypatch.setattr(TextStream, "flush", Mock(side_effect=ValueError("no such text")))
    with Engine(ToyModel(max_len=10**5, delay=0.001), make_tokenizer()) as engine:
        listener = Listener()
        ticket = engine.submit([3, 4], SamplingParams(max_tokens=None, ignore_eos=True), listener)
        ticket.cancel()
        assert ticket.wait(60) and engine.state == "ready"
        assert isinstance(listener.end.error, GenerationError)


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_string_anywhere_in_the_answer_ends_it_there(engine, seed):
    rng = random.Random(seed)
    tokens = naive_generate([seed, 1], max_tokens=80, ignore_eos=True)
    text = engine.tokenizer.decode(tokens)
    place = rng.randrange(5, len(text) - 5)
    stop = text[place : place + rng.randint(1, 4)]
    params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True, stop=[stop, "never to be found"])
    result = ask(engine, [seed, 1], params)
    assert result.text[0] == text[: text.index(stop)]
    assert (result.end.reason, result.end.stop) == ("stop", stop)
    assert result.tokens[0] == tokens[: len(result.tokens[0])] and len(result.tokens[0]) < 80
    shown = "".join(event.text for event in result.events[0] if isinstance(event, TokenEvent))
    assert text.startswith(shown), "nothing is shown that has to be taken back"


def test_min_tokens_holds_off_stop_strings_too(engine):
    tokens = naive_generate([8], max_tokens=30, ignore_eos=True)
    text = engine.tokenizer.decode(tokens)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=list(dict.fromkeys(text[:8])))
    assert len(ask(engine, [8], params).tokens[0]) == 1
    late = ask(engine, [8], params.replace(min_tokens=10))
    assert len(late.tokens[0]) >= 10


def test_the_tokenizers_end_token_ends_an_answer_too():
    """A chat model's turn ends with <|im_end|>, its tokenizer's, where its configuration names <|endoftext|>."""
    model, tokenizer = ToyModel(), make_tokenizer()
    model.manifest.metadata["eos_token_ids"] = [EOS[0]]
    tokenizer.eos_token_id = EOS[1]
    with Engine(model, tokenizer) as engine:
        params = SamplingParams(max_tokens=20, temperature=0, logit_bias={EOS[1]: 100})
        assert ask(engine, [7, 8], params).end.reason == "stop"
        assert engine.eos_token_ids == (EOS[0], EOS[1])
