"""One choice of a request: its tokens, and how many of them are in the KV cache."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from nxd_server.engine.prompt_lookup import Lookup
from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.text.grammars import Guide


@dataclass(eq=False)
class Sequence:
    """A choice as the scheduler sees it. The keys and values of ``computed`` tokens are in ``slot``."""

    id: int
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    slot: int | None = None
    computed: int = 0
    reused: int = 0
    """Prompt tokens whose keys and values were in ``slot`` already."""
    cache_key: Hashable = None
    """What else these depend on."""
    output: list[int] = field(default_factory=list)
    lookup: Lookup = field(default_factory=Lookup)
    guide: Guide | None = None
    """Its place in the grammar that it follows."""

    @property
    def remaining(self) -> int:
        """Prompt tokens that are not in the cache yet; 0 while decoding."""
        return max(0, len(self.prompt) - self.computed)

    @property
    def goes_on(self) -> bool:
        """Whether another token may be wanted after those that the steps in flight will give."""
        return self.computed + 2 <= len(self.prompt) + self.max_new_tokens

    @property
    def waits(self) -> bool:
        """Whether its next token is known only after the steps in flight."""
        return self.computed >= len(self.prompt) + len(self.output)

    def tokens(self, start: int, length: int) -> list[int]:
        """Return the tokens at positions ``start`` to ``start + length - 1`` of prompt and output together, as far as
        they are known."""
        prompt = len(self.prompt)
        if start >= prompt:
            return self.output[start - prompt : start - prompt + length]
        if start + length <= prompt:
            return self.prompt[start : start + length]
        return (self.prompt + self.output)[start : start + length]


_MASK = (1 << 64) - 1


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of choice ``index``: choice 0 has the request's, the others derive from it (splitmix64)."""
    if index == 0:
        return seed
    mixed = (seed + 0x9E3779B97F4A7C15 * index) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1
