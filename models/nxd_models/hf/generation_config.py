"""What ``generation_config.json`` says of a decoder: the tokens that begin and end a text, and how to draw others."""

from __future__ import annotations

from pathlib import Path

from nxd_models.hf.config import DecoderConfig, Fields, eos_token_ids, read_json

_RANGES = {"temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 10)}
"""What a request may ask for, too."""


def _read(model_dir: Path) -> Fields:
    file = model_dir / "generation_config.json"
    return Fields(read_json(file) if file.is_file() else {}, str(file))


def special_tokens(model_dir: Path, config: DecoderConfig) -> tuple[int | None, list[int]]:
    """Begin and ends of a sequence; the file comes before ``config.json``, as in transformers."""
    fields = _read(model_dir)
    bos = fields.raw.get("bos_token_id", config.bos_token_id)
    return bos if isinstance(bos, int) else None, list(eos_token_ids(fields) or config.eos_token_ids)


def sampling_defaults(model_dir: Path) -> dict[str, float]:
    """Sampling by the names of a request's fields, as far as the file says; ``do_sample`` false is temperature 0.

    Raises ModelConfigError naming a field that no request could have either.
    """
    fields = _read(model_dir)
    found: dict[str, float] = {}
    for name, (low, high) in _RANGES.items():
        value = fields.raw.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise fields.error(name, f"expected a number from {low} to {high}")
        found[name] = float(value)
    if fields.raw.get("top_k") is not None:
        found["top_k"] = max(0, fields.integer("top_k", minimum=-1))
    if not fields.flag("do_sample", default=True):
        found["temperature"] = 0.0
    return found
