"""What ``nxd-infer bench`` sends. The command's options are made from these."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.options import check_each, option

OBJECTIVES = {"ttft": "first token", "tpot": "time per further token", "e2el": "whole answer"}


def objectives(name: str, given: list[str]) -> dict[str, float]:
    """Return milliseconds by what they limit."""
    found: dict[str, float] = {}
    for word in given:
        match = re.fullmatch(rf"({'|'.join(OBJECTIVES)}):(\d+(?:\.\d+)?)", word)
        if match is None:
            raise ParallelConfigError(
                f"{name}: {word!r} is no limit in milliseconds such as ttft:500, tpot:50, e2el:3000"
            )
        found[match[1]] = float(match[2])
    return found


@dataclass(frozen=True)
class LoadOptions:
    """Raises ParallelConfigError with the name of each faulty option."""

    requests: int = option(100, "How many requests.", int, minimum=1, flag="")
    concurrency: int = option(16, "Most requests at a time.", int, minimum=1, maximum=10_000, flag="")
    rate: float | None = option(
        None, "Requests a second; without it the next begins when one ends.", float, above=0, flag=""
    )
    arrivals: str = option("poisson", "How requests of a rate arrive.", str, choices=("poisson", "fixed"), flag="")
    prompt_tokens: int = option(128, "Tokens of a prompt, about.", int, minimum=1, flag="")
    shared_prefix: int = option(
        0, "Of those, how many all prompts have in common at their start.", int, minimum=0, flag=""
    )
    max_tokens: int = option(
        64, "Tokens of an answer, exactly, where the server knows `ignore_eos`.", int, minimum=1, flag=""
    )
    goodput: Any = option(
        [],
        "An objective in milliseconds: ttft:500 (first token), tpot:50 (each further one), e2el:3000 (the whole "
        "answer). Requests that keep all of them are good.",
        list[str],
        repeats=True,
        flag="",
        check=objectives,
    )
    model: str | None = option(None, "Which of the server's models; by default the first.", str, flag="")
    api_key: str | None = option(None, "The server's key; by default OPENAI_API_KEY.", str, secret=True, flag="")
    seed: int = option(0, "Seed of prompts and arrivals.", int, flag="")
    timeout: float = option(600.0, "Seconds that all of it may take.", float, above=0, flag="")
    json: Path | None = option(None, "Write every request's figures to this file.", Path, flag="")
    plot: Path | None = option(None, "Draw rates and latencies into this file (.svg, .png, .pdf).", Path, flag="")

    def __post_init__(self) -> None:
        check_each(self, ParallelConfigError)
        if self.shared_prefix > self.prompt_tokens:
            raise ParallelConfigError(
                f"shared_prefix is a part of the prompt: at most prompt_tokens ({self.prompt_tokens}), "
                f"got {self.shared_prefix}"
            )
        if self.goodput == []:
            object.__setattr__(self, "goodput", {})
