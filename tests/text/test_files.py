"""Which files make a tokenizer."""

from __future__ import annotations

import pytest

from nxd_infer.errors import ModelConfigError
from nxd_server.llm import _tokenizer
from nxd_server.text.files import has_tokenizer


@pytest.mark.check
@pytest.mark.parametrize(
    ("names", "whole"),
    [
        (["tokenizer.json"], True),
        (["vocab.txt"], True),
        (["vocab.json", "merges.txt"], True),
        (["vocab.json"], False),
        (["config.json"], False),
    ],
)
def test_all_files_of_one_kind_make_a_tokenizer(names, whole):
    assert has_tokenizer(names) == whole


@pytest.mark.check
def test_half_a_tokenizer_is_an_error_and_none_is_none(tmp_path):
    assert _tokenizer(tmp_path) is None
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelConfigError, match=r"nor vocab\.json with merges\.txt"):
        _tokenizer(tmp_path)
