"""What a model's generation_config.json may say."""

from __future__ import annotations

import json

import pytest

from nxd_infer.errors import ModelConfigError
from nxd_models.hf.generation_config import GenerationConfig
from nxd_models.serving import tasks
from nxd_server import SamplingParams
from tests.support.tiny_models import write_tiny


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": None, "top_k": None}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0, "top_k": 20}),
        ({"do_sample": True, "top_p": 1, "top_k": -1}, {"top_p": 1.0, "top_k": 0}),
    ],
)
def test_what_a_file_says(tmp_path, fields, expected):
    path = write_tiny("llama", tmp_path, generation=fields)
    assert tasks.plan(path).metadata["sampling_defaults"] == expected
    SamplingParams(**expected)


def test_what_requests_do_not_get_is_said(tmp_path):
    fields = {"no_repeat_ngram_size": 3, "num_beams": 4, "suppress_tokens": [1], "forced_eos_token_id": 2, "top_k": 5}
    path = write_tiny("llama", tmp_path, generation={**fields, "typical_p": 1.0, "min_length": 0, "bad_words_ids": []})
    told = ["forced_eos_token_id = 2", "no_repeat_ngram_size = 3", "num_beams = 4", "suppress_tokens = [1]"]
    assert tasks.plan(path).metadata["generation_without_effect"] == told


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 3}, {"temperature": "hot"}, {"top_p": 1.5}, {"min_p": True}, {"repetition_penalty": 0},
        {"top_k": 2.5}, {"do_sample": "yes"}, {"top_p": float("nan")},
    ],
)  # fmt: skip
def test_what_no_request_could_have_is_refused_by_name(tmp_path, fields):
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelConfigError, match=rf"generation_config\.json: {next(iter(fields))} = "):
        GenerationConfig.of(tmp_path)
