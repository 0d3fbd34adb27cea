"""A tiny encoder as sentence-transformers writes it."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from tests.support.tiny_models import write_tiny

MODULES = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")


def write_sentence_model(directory, pooling, *, normalize=True, settings=None, prompts=None, family="bert", dense=()):
    """A tiny encoder with the files that the library writes; ``dense``: outputs and activation of each layer."""
    path = write_tiny(family, directory)
    layers = [("Dense", f"{n}_Dense") for n, _ in enumerate(dense, 2)]
    inputs = 32
    for (_, folder), (outputs, activation) in zip(layers, dense, strict=True):
        (path / folder).mkdir()
        name = f"torch.nn.modules.activation.{activation}" if activation != "Identity" else "torch.nn.Identity"
        sizes = {"in_features": inputs, "out_features": outputs, "bias": True}
        (path / folder / "config.json").write_text(json.dumps({**sizes, "activation_function": name}))
        layer = torch.nn.Linear(inputs, outputs)
        tensors = {f"linear.{key}": tensor for key, tensor in layer.state_dict().items()}
        save_file(tensors, path / folder / "model.safetensors")
        inputs = outputs
    modules = [
        {"idx": n, "name": str(n), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, folder) in enumerate((*MODULES[:2], *layers, *MODULES[2 if normalize else 3 :]))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, **(settings or {})}))
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts or {}))
    return path
