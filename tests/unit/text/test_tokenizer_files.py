"""Which files make a tokenizer."""

from __future__ import annotations

import json

import pytest

from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.errors import ModelConfigError
from nxd_infer.runtime.load import load_artifact
from nxd_server.llm import _tokenizer
from nxd_server.text.chat_template import ChatTemplate, TemplateSources
from nxd_server.text.tokenizer import Tokenizer
from tests.support import tiny_models
from tests.support import toy_artifacts as toy

ADDITIONAL = "additional_chat_templates/tool_use.jinja"


def test_half_a_tokenizer_is_an_error_and_none_is_none(tmp_path):
    assert _tokenizer(tmp_path) is None
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelConfigError, match=r"nor vocab\.json with merges\.txt"):
        _tokenizer(tmp_path)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """An artifact with a tokenizer, a template and a further one."""
    top = tmp_path_factory.mktemp("listed")
    model = tiny_models.write_tiny("llama", top / "model")
    manifest = load_artifact(toy.build(top / "toy")).manifest
    with ArtifactWriter(top / "artifact") as writer:
        for name in manifest.files:
            writer.add(name, top / "toy" / name)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            writer.add(name, model / name)
        writer.write_bytes("chat_template.json", json.dumps({"chat_template": "signed {{ bos_token }}"}).encode())
        writer.write_bytes(ADDITIONAL, b"signed tools")
        writer.commit(manifest.model_copy(deep=True))
    return top / "artifact"


UNLISTED = {
    "chat_template.jinja": "{{ 'planted' }}",
    "special_tokens_map.json": '{"unk_token": "planted"}',
    "additional_chat_templates/rag.jinja": "planted",
    "sentence_bert_config.json": '{"do_lower_case": true}',
}


@pytest.mark.parametrize("name", UNLISTED)
def test_a_file_that_the_manifest_does_not_list_changes_nothing(listed, name, caplog):
    def answers():
        artifact = load_artifact(listed)
        sources, tokenizer = TemplateSources.from_dir(artifact), Tokenizer.from_dir(artifact)
        assert sources == TemplateSources.from_dir(artifact)  # and no second warning
        return sources, tokenizer.encode("The Quick FOX"), tokenizer.config

    before = answers()
    assert before[0].default.startswith("signed") and before[0].named["tool_use"] == "signed tools"
    file = listed / name
    file.write_text(UNLISTED[name])
    try:
        assert answers() == before
        (warning,) = caplog.messages
        assert str(file) in warning and "ignored" in warning
        planted = TemplateSources.from_dir(listed), Tokenizer.from_dir(listed).encode("The Quick FOX")
        assert planted != before[:2]  # it is read where nobody signs: in a model's directory
    finally:
        file.unlink()


def test_a_tokenizer_that_is_not_listed_is_none(tmp_path):
    artifact = load_artifact(toy.build(tmp_path / "artifact"))
    model = tiny_models.write_tiny("llama", tmp_path / "model")
    for name in ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt"):
        (tmp_path / "artifact" / name).write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "artifact" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "planted"}))
    assert _tokenizer(artifact) is None and ChatTemplate.from_dir(artifact) is None
    with pytest.raises(ModelConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(artifact)
