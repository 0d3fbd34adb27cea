"""A sample of transformers' architectures, traced and compared; the page that lists all says the same of them."""

import pytest

from tests.foreign.architectures import PAGE, STATES, Result, page, stated, tried
from tests.support.one_thread import one_thread

__all__ = ["one_thread"]
SAMPLE = {
    "generate/deepseek_v3": "served",  # keys and values of different sizes; experts that files hold one by one
    "generate/gemma3_text": "served",  # layers with and without a window
    "generate/mamba": "slow",
    "generate/falcon": "slow",  # with ALiBi, which transformers' eager attention adds twice
    "generate/bert": "served",  # as a decoder
    "classify/qwen3": "served",  # reads the last token that is not padding
    "classify/deberta-v2": "served",
    "token-classification/distilbert": "served",
    "question-answering/electra": "served",
    "fill-mask/mpnet": "served",  # counts positions from padding's
    "embed/xlm-roberta": "served",
    "fill-mask/fnet": "refused",  # mixes padding into the text
}


@pytest.mark.parametrize("name", SAMPLE)
def test_an_architecture_gives_what_transformers_gives_or_is_refused(name):
    task, kind = name.split("/")
    result = tried(task, kind)
    assert result.state == SAMPLE[name], result
    assert stated(PAGE.read_text())[task, kind] == result.state, "run python -m tests.foreign.architectures"


def test_the_page_counts_what_it_lists():
    found = stated(PAGE.read_text())
    results = [Result(task, kind, state) for (task, kind), state in found.items()]
    version = PAGE.read_text().partition("transformers ")[2].partition("transformers ")[2].split()[0]
    assert page(results, version) == PAGE.read_text()
    assert len(found) >= 120
    assert sum(state != STATES[-1] for state in found.values()) >= 0.8 * len(found)
