"""The numbers that a sampler in the graphs takes per row, each declared once: limits, neutral value, what it does.

A traced step has an input of each name (``nxd_models.serving.decoder_step``). The checks of the server's
``SamplingParams``, the fields of a request's body, the inputs of a step, the fields of ``generation_config.json`` and
the options of ``nxd-infer generate`` are derived from this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxd_infer.util.options import Option


@dataclass(frozen=True)
class SamplerField(Option):
    """A number that the graphs' sampler takes per row. Its default is the value if a request does not set it."""

    off: float = 0.0
    """Disables the parameter: rows without a request hold this value, and graphs may lack the input."""
    model_may_set: bool = True
    """Whether the model's ``generation_config.json`` may set it if a request does not."""
    uses_history: bool = False
    """Whether its effect depends on earlier tokens: guesses cannot be verified with it."""


SAMPLER_FIELDS: dict[str, SamplerField] = {
    "temperature": SamplerField(1.0, "0 is greedy; up to 2.", float, minimum=0, maximum=2),
    "top_p": SamplerField(
        1.0, "Keep the most likely tokens up to this probability mass.", float, minimum=0, maximum=1, off=1.0
    ),
    "top_k": SamplerField(0, "Keep this many tokens; 0 or -1 keeps all.", int, minimum=-1, off=0),
    "min_p": SamplerField(
        0.0,
        "Keep the tokens that are at least this many times as likely as the likeliest.",
        float,
        minimum=0,
        maximum=1,
    ),
    "presence_penalty": SamplerField(
        0.0,
        "Subtracted from the logit of each token that was generated before.",
        float,
        minimum=-2,
        maximum=2,
        model_may_set=False,
        uses_history=True,
    ),
    "frequency_penalty": SamplerField(
        0.0,
        "Subtracted from the logit of each token as often as it was generated before.",
        float,
        minimum=-2,
        maximum=2,
        model_may_set=False,
        uses_history=True,
    ),
    "repetition_penalty": SamplerField(
        1.0,
        "Above 1, makes tokens of the prompt and the answer less likely to come again.",
        float,
        minimum=0.01,
        maximum=10,
        off=1.0,
        uses_history=True,
    ),
}
"""By the name of the request's parameter and of the graphs' input."""
