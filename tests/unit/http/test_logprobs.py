"""The tables of log-probabilities, without a server."""

from __future__ import annotations

import pytest

from nxd_server.engine.request import PromptEvent, TokenEvent
from nxd_server.http.openai.completions import Completion, _Answer
from nxd_server.http.openai.logprobs import LegacyLogprobs
from nxd_server.http.openai.schemas import CompletionBody
from nxd_server.text.detokenize import Detokenizer
from tests.support.text.text_tokenizers import KINDS


@pytest.mark.parametrize("continues", [False, True], ids=["new text", "continues a prompt"])
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_places_in_the_text_that_is_answered(kind, continues):
    """It lacks special tokens, and its first space depends on what is before it."""
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("the quick brown fox, 你好 naïve", add_special_tokens=False)
    ids.insert(3, min(tokenizer.special_ids))
    before = tokenizer.encode("over", add_special_tokens=False) if continues else []
    text, places = "", []
    stream, table = Detokenizer(tokenizer, before), LegacyLogprobs(tokenizer, 0, before)
    for token in ids:
        places.append(len(text))
        text += stream.push(token)
        table.add(TokenEvent(0, token, "", 0.0))
    assert table.take()["text_offset"] == places


def test_choices_of_a_prompt_share_what_is_rendered_of_it():
    tokenizer, prompts = KINDS[next(iter(KINDS))](), [[5, 6], [7, 8, 9]]
    body = CompletionBody.parse({"prompt": prompts, "n": 2, "prompt_logprobs": 1})
    answer = _Answer(Completion(None, "m", tokenizer, prompts, 2, ["", ""], True), body)
    for choice in range(4):
        scores = [(-1.0, ((3, -0.5),))] * (len(prompts[choice // 2]) - 1)
        answer.prompt(choice, PromptEvent(choice % 2, scores))
    first, second, third, fourth = (answer.choice(choice, "", "stop")["prompt_logprobs"] for choice in range(4))
    assert first is second and third is fourth and [len(first), len(third)] == [2, 3]
