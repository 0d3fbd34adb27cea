"""What ``generation_config.json`` says of a decoder: the tokens that begin and end a text, and how to draw others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from nxd_models.hf.config_file import Flag, Problem, SpecialTokens, read_json
from nxd_models.spec import DecoderConfig

UpToOne = Annotated[float, Field(ge=0, le=1), Problem("expected a number from 0 to 1")]


class GenerationConfig(SpecialTokens):
    """The fields that we read. Their ranges are those of a request."""

    temperature: Annotated[float, Field(ge=0, le=2), Problem("expected a number from 0 to 2")] | None = None
    top_p: UpToOne | None = None
    min_p: UpToOne | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10), Problem("expected a number from 0.01 to 10")] | None = (
        None
    )
    top_k: Annotated[int, Field(ge=-1), Problem("expected a whole number of at least -1")] | None = None
    do_sample: Flag = True

    @classmethod
    def of(cls, model_dir: Path) -> GenerationConfig:
        """The directory's file, or an empty one. Raises ModelConfigError naming a field that no request could have."""
        file = model_dir / "generation_config.json"
        return cls.read(read_json(file) if file.is_file() else {}, str(file))

    def special_tokens(self, config: DecoderConfig) -> tuple[int | None, list[int]]:
        """Begin and ends of a sequence; this file comes before ``config.json``, as in transformers."""
        bos = self.bos if "bos_token_id" in self._raw else config.bos_token_id
        return bos, list(self.eos or config.eos_token_ids)

    def sampling_defaults(self) -> dict[str, float]:
        """Sampling by the names of a request's fields, as far as the file says; not to sample is temperature 0."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            found["top_k"] = max(0, self.top_k)
        if not self.do_sample:
            found["temperature"] = 0.0
        return found
