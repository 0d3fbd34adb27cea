"""Which files make a tokenizer."""

from __future__ import annotations

import json
import sys

import pytest

from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.errors import MissingPackageError, ModelConfigError
from nxd_infer.hugging_face.tokenizer import CHECK, canonical_files
from nxd_infer.runtime.load import load_artifact
from nxd_server.errors import TokenizerMismatchError
from nxd_server.llm import _tokenizer
from nxd_server.text.chat_template import ChatTemplate, TemplateSources
from nxd_server.text.tokenizer import Tokenizer
from tests.support import tiny_models
from tests.support import toy_artifacts as toy

ADDITIONAL = "additional_chat_templates/tool_use.jinja"


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """An artifact with a tokenizer, a template and a further one."""
    top = tmp_path_factory.mktemp("listed")
    model = tiny_models.write_tiny("llama", top / "model")
    manifest = load_artifact(toy.build(top / "toy")).manifest
    with ArtifactWriter(top / "artifact") as writer:
        for name in manifest.files:
            writer.add(name, top / "toy" / name)
        for name, content in canonical_files(model).items():
            if name != "tokenizer_config.json":
                writer.write_bytes(name, content)
        writer.write_bytes(ADDITIONAL, b"signed tools")
        writer.commit(manifest.model_copy(deep=True))
    return top / "artifact"


UNLISTED = {
    "tokenizer_config.json": '{"unk_token": "planted"}',
    "additional_chat_templates/rag.jinja": "planted",
}


@pytest.mark.parametrize("name", UNLISTED)
def test_a_file_that_the_manifest_does_not_list_changes_nothing(listed, name, caplog):
    def answers():
        artifact = load_artifact(listed)
        sources, tokenizer = TemplateSources.from_dir(artifact), Tokenizer.from_dir(artifact)
        assert sources == TemplateSources.from_dir(artifact)  # and no second warning
        return sources, tokenizer.encode("The Quick FOX"), tokenizer.config

    before = answers()
    assert before[0] is not None and before[0].named == {"tool_use": "signed tools"}
    file = listed / name
    file.write_text(UNLISTED[name])
    try:
        assert answers() == before
        (warning,) = caplog.messages
        assert str(file) in warning and "ignored" in warning
        assert TemplateSources.from_dir(listed) != before[0]  # it is read where nobody signs: in a directory
    finally:
        file.unlink()


def test_a_tokenizer_that_is_not_listed_is_none(tmp_path):
    artifact = load_artifact(toy.build(tmp_path / "artifact"))
    model = tiny_models.write_tiny("llama", tmp_path / "model")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / "artifact" / name).write_bytes((model / name).read_bytes())
    assert _tokenizer(artifact) is None and ChatTemplate.from_dir(artifact) is None
    with pytest.raises(ModelConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(artifact)


def test_an_artifact_whose_tokenizer_gives_other_ids_here_is_refused(listed, tmp_path, monkeypatch):
    """As another version of the library might; it is compared with what was traced."""

    def artifact(name: str, **changed: bytes | None):
        with ArtifactWriter(tmp_path / name) as writer:
            for file in load_artifact(listed).manifest.files:
                content = changed.get(file.split(".")[0], (listed / file).read_bytes())
                if content is not None:
                    writer.write_bytes(file, content)
            writer.commit(load_artifact(listed).manifest.model_copy(deep=True))
        return load_artifact(tmp_path / name)

    monkeypatch.setitem(sys.modules, "transformers", None)  # which a server does not need
    check = json.loads((listed / CHECK).read_text())
    assert Tokenizer.from_dir(artifact("same")).encode(check["texts"][2]["text"]) == check["texts"][2]["ids"]
    check["texts"][2]["ids"].pop()
    with pytest.raises(TokenizerMismatchError, match=r"Hello, World! .* by tokenizers .* trace the model again"):
        Tokenizer.from_dir(artifact("other", tokenizer_check=json.dumps(check).encode()))
    with pytest.raises(MissingPackageError, match=r"transformers is not installed: pip install"):
        canonical_files(tiny_models.write_tiny("llama", tmp_path / "model"))
    with pytest.raises(TokenizerMismatchError, match=r"tokenizer\.json without tokenizer_check\.json: trace the model"):
        Tokenizer.from_dir(artifact("unchecked", tokenizer_check=None))
