"""The numbers that a sampler in the graphs takes per row, each declared once: limits, neutral value, what it does.

A traced step has an input of each name (``nxd_models.serving.decoder_step``). The checks of the server's
``SamplingParams``, the fields of a request's body, the inputs of a step, the fields of ``generation_config.json`` and
the options of ``nxd-infer generate`` are derived from this table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplerField:
    """A number that the graphs' sampler takes per row."""

    help: str
    default: float
    """The value if a request does not set it."""
    off: float
    """Disables the parameter: rows without a request hold this value, and graphs may lack the input."""
    low: float
    high: float | None
    whole: bool = False
    model_may_set: bool = True
    """Whether the model's ``generation_config.json`` may set it if a request does not."""
    uses_history: bool = False
    """Whether its effect depends on earlier tokens: guesses cannot be verified with it."""

    @property
    def kind(self) -> type[int] | type[float]:
        return int if self.whole else float

    @property
    def limits(self) -> str:
        """``from 0 to 2``, or ``at least -1``."""
        return _limits(self.low, self.high)

    def checked(self, value: Any) -> float:
        """Return ``value`` as a number. Raises ValueError if it is not one, or outside the limits."""
        return whole_number(value, self.low, self.high) if self.whole else number(value, self.low, self.high)


def whole_number(value: Any, low: float, high: float | None = None) -> int:
    """Return ``value`` as an int. Raises ValueError if it is not a whole number, or outside the limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        if not (isinstance(value, float) and value.is_integer()):
            raise ValueError(f"must be a whole number, got {value!r}")
        value = int(value)
    if value < low or (high is not None and value > high):
        raise ValueError(f"must be {_limits(low, high)}, got {value}")
    return value


def number(value: Any, low: float, high: float | None = None) -> float:
    """Return ``value`` as a finite float. Raises ValueError if it is not a number, or outside the limits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be a number, got {value!r}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found) or found < low or (high is not None and found > high):
        raise ValueError(f"must be {_limits(low, high)}, got {value!r}")
    return found


def _limits(low: float, high: float | None) -> str:
    least, most = (f"{limit:g}" if isinstance(limit, float) else f"{limit}" for limit in (low, high))
    return f"at least {least}" if high is None else f"from {least} to {most}"


SAMPLER_FIELDS: dict[str, SamplerField] = {
    "temperature": SamplerField("0 is greedy; up to 2.", default=1.0, off=0.0, low=0.0, high=2.0),
    "top_p": SamplerField(
        "Keep the most likely tokens up to this probability mass.", default=1.0, off=1.0, low=0.0, high=1.0
    ),
    "top_k": SamplerField("Keep this many tokens; 0 or -1 keeps all.", default=0, off=0, low=-1, high=None, whole=True),
    "min_p": SamplerField(
        "Keep the tokens that are at least this many times as likely as the likeliest.",
        default=0.0,
        off=0.0,
        low=0.0,
        high=1.0,
    ),
    "presence_penalty": SamplerField(
        "Subtracted from the logit of each token that was generated before.",
        default=0.0,
        off=0.0,
        low=-2.0,
        high=2.0,
        model_may_set=False,
        uses_history=True,
    ),
    "frequency_penalty": SamplerField(
        "Subtracted from the logit of each token as often as it was generated before.",
        default=0.0,
        off=0.0,
        low=-2.0,
        high=2.0,
        model_may_set=False,
        uses_history=True,
    ),
    "repetition_penalty": SamplerField(
        "Above 1, makes tokens of the prompt and the answer less likely to come again.",
        default=1.0,
        off=1.0,
        low=0.01,
        high=10.0,
        uses_history=True,
    ),
}
"""By the name of the request's parameter and of the graphs' input."""
