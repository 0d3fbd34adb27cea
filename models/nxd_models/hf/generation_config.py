"""Read ``generation_config.json``: the tokens that begin and end a text, and the sampling defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, create_model

from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_models.hf.config_file import Flag, Problem, SpecialTokens, read_json
from nxd_models.spec import DecoderConfig

OWN = {name: field for name, field in SAMPLER_FIELDS.items() if field.model_may_set}
"""The sampling parameters that a model's file may set."""

_UNREAD = """
bad_words_ids begin_suppress_tokens diversity_penalty dola_layers encoder_no_repeat_ngram_size
encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id
forced_eos_token_id guidance_scale max_new_tokens min_length min_new_tokens no_repeat_ngram_size num_beams
num_return_sequences penalty_alpha sequence_bias stop_strings suppress_tokens top_h typical_p watermarking_config
"""
_OFF_AT_1 = ("encoder_repetition_penalty", "guidance_scale", "num_beams", "num_return_sequences", "top_h", "typical_p")
"""Fields that transformers' generate reads and a server does not; of some, 1 has no effect."""


def _sampler_fields() -> dict[str, Any]:
    """Return the sampler's numbers as fields of the file, with the limits of a request."""
    made: dict[str, Any] = {}
    for name, field in OWN.items():
        limits = Field(ge=field.minimum, le=field.maximum)
        made[name] = (Annotated[field.kind, limits, Problem(f"expected {field.wanted}")], None)  # null is absent
    return made


class GenerationConfig(create_model("SamplerDefaults", __base__=SpecialTokens, **_sampler_fields())):
    """The fields that we read."""

    do_sample: Flag = True

    @classmethod
    def of(cls, model_dir: Path) -> GenerationConfig:
        """Read the directory's file, or return an empty one. Raises ModelConfigError naming a field out of range."""
        file = model_dir / "generation_config.json"
        return cls.read(read_json(file) if file.is_file() else {}, str(file))

    def special_tokens(self, config: DecoderConfig) -> tuple[int | None, list[int]]:
        """Return the begin and end tokens; this file overrides ``config.json``, as in transformers."""
        bos = self.bos if "bos_token_id" in self._raw else config.bos_token_id
        return bos, list(self.eos or config.eos_token_ids)

    def sampling_defaults(self) -> dict[str, float]:
        """Return the sampling defaults by request field; disabled sampling becomes temperature 0."""
        found = {name: value for name in OWN if (value := getattr(self, name)) is not None}
        if "top_k" in found:
            found["top_k"] = max(0, found["top_k"])
        if not self.do_sample:
            found["temperature"] = 0.0
        return found

    def without_effect(self) -> list[str]:
        """Return what the file asks of transformers' generate that no request here gets, as "name = value"."""
        given = {name: self._raw.get(name) for name in _UNREAD.split()}
        return [
            f"{name} = {value!r}" for name, value in given.items() if value and (value != 1 or name not in _OFF_AT_1)
        ]
