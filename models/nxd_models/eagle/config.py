"""``config.json`` of an EAGLE head: that of a Llama of one layer, with a few fields of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_models.llama.config import LlamaConfig, read_config

OWN = ("architectures", "bias", "draft_vocab_size", "eagle_config", "norm_before_residual", "target_hidden_size")
"""Fields that no Llama has, and ``architectures``, whose names differ from one maker to the next."""


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LlamaConfig):
    """A head. ``vocab_size`` is the target's."""

    kind: str
    """"eagle" or "eagle3": which hidden states it is given (``nxd_models.serving.decoder_step``)."""
    features: int
    """Numbers that it is given for a token: the target's hidden size, or three times that."""
    fc_bias: bool = False
    draft_vocab_size: int
    """Tokens that it can guess; ``d2t`` says which these are, if they are not all."""


def read_head(raw: Mapping[str, Any], origin: str, kind: str, features: int, fc_bias: bool) -> EagleConfig:
    """Return the configuration of a head. Raises ModelConfigError naming the field that cannot be run exactly."""
    for name in ("eagle_config", "norm_before_residual"):  # of other layers, or with another residual
        if value := raw.get(name):
            raise ModelConfigError(f"{origin}: {name} = {value!r}: heads of this form are not supported")
    base = read_config({name: value for name, value in raw.items() if name not in OWN}, origin)
    if base.mixture is not None or (kind == "eagle3" and base.num_layers != 1):
        layers = f"num_hidden_layers = {base.num_layers}"
        raise ModelConfigError(f"{origin}: {layers}: an {kind} head has one layer, without experts")
    guessed = raw.get("draft_vocab_size") or base.vocab_size
    least = 1 if kind == "eagle3" else base.vocab_size
    if type(guessed) is not int or not least <= guessed <= base.vocab_size:
        raise ModelConfigError(f"{origin}: draft_vocab_size = {guessed!r}: expected {least} to {base.vocab_size}")
    base = replace(base, tied=False)  # its output layer has weights of its own, or the target's
    given = {field.name: getattr(base, field.name) for field in fields(base)}
    return EagleConfig(**given, kind=kind, features=features, fc_bias=fc_bias, draft_vocab_size=guessed)
