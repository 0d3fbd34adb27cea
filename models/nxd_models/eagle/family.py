"""From the directory of a head, and that of the model it guesses for, to what is traced.

A checkpoint of a head usually lacks the embedding, and the first kind the output layer: they are the target's.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from nxd_infer.errors import CheckpointError, ModelConfigError
from nxd_infer.hugging_face import weights as hf
from nxd_infer.hugging_face.gguf_file import model_directory
from nxd_infer.layout.sources import FirstOf, RemappedSource
from nxd_models.eagle.config import read_head
from nxd_models.eagle.model import EagleHead, EagleStep
from nxd_models.hf.config_file import read_json
from nxd_models.registry import load_config
from nxd_models.spec import DecoderConfig, ModelDirectory, ModelSpec, Task

PICKLED = "pytorch_model.bin"
SHARED = ("embed_tokens.weight", "lm_head.weight")


def load_head(model_dir: str | os.PathLike[str], target: str | os.PathLike[str]) -> ModelDirectory:
    """Read the head in ``model_dir`` of the model in ``target``. Raises ModelConfigError for what is no head, or not
    this target's, CheckpointError for weights that cannot be read."""
    path, model = Path(model_dir), load_config(target, task="generate")
    if not any(path.glob("*.safetensors")) and (path / PICKLED).exists():  # that no class of transformers reads
        convert = f"save_file(torch.load('{PICKLED}', weights_only=True), 'model.safetensors')"
        raise CheckpointError(
            f"{path} holds {PICKLED} and no safetensors file: pickled weights are never loaded; convert them once, "
            f"where you trust them: safetensors.torch.{convert}"
        )
    file, weights, theirs = path / "config.json", hf.weights(path, ties=False), model.config
    raw = read_json(file)
    if weights.resolve("fc.weight") is None:
        raise ModelConfigError(f"{path} is no EAGLE head, it has no weight fc: trace a model without --head-of")
    if not isinstance(theirs, DecoderConfig) or not model.spec.gives_hidden_states:
        raise ModelConfigError(f"head_of = {target}: heads guess for models of the Llama family, natively traced")
    three, shape = weights.resolve("midlayer.self_attn.q_proj.weight") is not None, weights.shape("fc.weight")
    if len(shape) != 2:
        raise CheckpointError(f"{path}: fc.weight has {len(shape)} dimensions, expected 2: damaged?")
    if not three and shape[1] == 3 * shape[0]:
        raise ModelConfigError(f"{path}: an EAGLE-3 head without midlayer: heads of this form are not supported")
    kind, features = "eagle3" if three else "eagle", shape[1] // (1 if three else 2)
    config = read_head(raw, str(file), kind, features, weights.resolve("fc.bias") is not None)
    states, words = ("hidden states of", features), ("vocabulary of", config.vocab_size)
    for (what, ours), wanted in ((states, theirs.hidden_size * (3 if three else 1)), (words, theirs.vocab_size)):
        if ours != wanted:
            raise ModelConfigError(
                f"{path}: this {kind} head is for a model with {what} {ours}, and {target} has {wanted}: name the "
                "model that it was made for with --head-of"
            )
    read = functools.partial(_weights, target=target, vocabulary=config.vocab_size)
    task = Task(EagleHead, EagleStep, blocks="layers", weights=read)
    tasks, head = {"generate": task}, {"kind": kind, "features": features}
    spec = ModelSpec(model_types=(config.model_type,), read_config=lambda *_: config, tasks=tasks, head=head)
    return ModelDirectory(path, spec, config, (), raw)


def _weights(path: Path, target: str | os.PathLike[str], vocabulary: int) -> FirstOf:
    own, theirs = hf.weights(path, ties=False), hf.weights(model_directory(target))
    embedding = theirs.resolve("model." + SHARED[0])
    taken = {name: theirs.resolve(name) or embedding for name in SHARED if own.resolve(name) is None}
    if own.resolve("d2t") is not None:  # indexes memory
        guessed = own.read("d2t").long()
        tokens = guessed + guessed.new_ones(guessed.shape).cumsum(0) - 1
        whole = guessed.dim() == 1 and guessed.numel() > 0
        if not whole or tokens.unique().numel() < tokens.numel() or tokens.min() < 0 or tokens.max() >= vocabulary:
            raise CheckpointError(f"{path}: d2t does not map guesses to different tokens below {vocabulary}: damaged?")
    return FirstOf(own, RemappedSource(theirs, {name: source for name, source in taken.items() if source}))
