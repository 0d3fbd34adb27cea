"""A tiny encoder as sentence-transformers writes it."""

from __future__ import annotations

import json

from tests.support.tiny_models import write_tiny

MODULES = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")


def write_sentence_model(directory, pooling, *, normalize=True, settings=None, prompts=None, family="bert"):
    """A tiny encoder with the files that the library writes."""
    path = write_tiny(family, directory)
    modules = [
        {"idx": n, "name": str(n), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, folder) in enumerate(MODULES[: 3 if normalize else 2])
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, **(settings or {})}))
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts or {}))
    return path
