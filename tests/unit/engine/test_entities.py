"""What a token classifier found is what transformers' pipeline makes of the same logits."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer as RawTokenizer

from nxd_server.engine.entities import STRATEGIES, entities_in
from nxd_server.text.tokenizer import Tokenizer
from tests.support.models.token_classifier import LABELS, TEXTS, expected, write_token_classifier
from tests.support.tiny_models import tokenizer_json


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_token_classifier(tmp_path_factory.mktemp("ner"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["wordpiece", "byte level"])
def test_entities_are_those_of_the_pipeline(path, tmp_path, strategy, kind):
    texts = TEXTS
    if kind == "byte level":  # which does not mark what continues a word
        config = transformers.BertConfig.from_pretrained(path, vocab_size=288)
        torch.manual_seed(1)
        transformers.BertForTokenClassification(config).save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text(tokenizer_json(decoder=False))
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        path, texts = tmp_path, [text[:24] for text in TEXTS]
    model = transformers.BertForTokenClassification.from_pretrained(path).eval()
    tokenizer = Tokenizer(RawTokenizer.from_file(str(path / "tokenizer.json")))
    for text, theirs in zip(texts, expected(path, texts, strategy), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(text)])).logits[0]
        ours = entities_in(text, logits, LABELS, tokenizer, strategy)
        assert len(theirs) > 1
        for mine, one in zip(ours, theirs, strict=True):
            assert mine.pop("score") == pytest.approx(one.pop("score"), rel=1e-5)
            assert mine == one
