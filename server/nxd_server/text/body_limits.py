"""How much a body may hold, field by field: asked where it is parsed, so that no more of it comes to the server.

What a large body holds is built twice: by the parser in a process of its own, and by the server out of what that one
sends. The second time holds up everybody, and so does whoever looks at it; so what no route would take goes nowhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_server.errors import RequestError, TextTooLongError

MOST_ELEMENTS = 2**19
"""Values of a body at most, whatever the model: with the longest lists of token ids that 64 prompts can be."""
MOST_IDS = 2**16
"""Token ids in one list, where the model's own maximum length is not more."""
MOST_PROMPTS, MOST_INPUTS = 1024, 2048
"""Texts of a request, before they are looked at; MOST_INPUTS for encoders, as OpenAI's limit."""
MOST_MESSAGES, MOST_MESSAGE_VALUES = 4096, 2**15
MOST_STOPS = 1024
MOST_VARIABLE_VALUES = 4096
"""In all of a template's variables."""
MOST_BIASES, MOST_STREAM_OPTIONS = 4096, 64
"""What a graph takes of biases is the engine's to say; no graph takes this many."""
MOST_OTHER_VALUES = 2**13
"""In any other field: adapters' names, biases, what is passed over."""
SPARE_VALUES = 2**14
"""In a body, beside its prompts."""


@dataclass(frozen=True)
class Bounds:
    """What a body may hold; None where nothing but its size says."""

    values: int = MOST_ELEMENTS
    """Numbers, texts, lists and objects in it."""
    ids: int | None = None
    """Numbers in one list."""
    characters: int | None = None
    """Of one text, or of all texts of a field of ``together``."""
    together: Sequence[str] = ()
    entries: Mapping[str, int] = field(default_factory=dict)
    """By field, how long it is itself. A list of numbers is one entry."""
    within: Mapping[str, int] = field(default_factory=dict)
    """By field, the values in it at all depths."""
    others: int | None = None
    """As ``within``, of fields that it does not name."""

    def check(self, body: Mapping[str, Any]) -> None:
        """RequestError, naming the field, for one that holds more; TextTooLongError for a text or ids."""
        for name, value in body.items():
            if isinstance(value, (str, list, dict)):
                self._check(name, value)

    def _check(self, name: str, value: str | list[Any] | dict[str, Any]) -> None:
        shown, most = name[:100], self.within.get(name, self.others)
        if name in self.entries and len(value) > self.entries[name] and not (isinstance(value, str) or _numbers(value)):
            raise _too_many(shown, len(value), self.entries[name])
        count, characters, rest = 0, 0, [value]
        while rest:
            one = rest.pop()
            if isinstance(one, str):
                characters = len(one) + (characters if name in self.together else 0)
                if self.characters is not None and characters > self.characters:
                    raise TextTooLongError(
                        shown,
                        f"the text has {characters} characters, which are more than fit: at most {self.characters} "
                        "characters are read for a model of this maximum context length",
                    )
                continue
            if self.ids is not None and len(one) > self.ids and _numbers(one):
                raise TextTooLongError(shown, f"a list of {len(one)} numbers; at most {self.ids} are taken")
            count += len(one)
            if most is not None and count > most:
                raise _too_many(shown, count, most)
            inner = one if isinstance(one, list) else one.values()
            rest.extend(each for each in inner if isinstance(each, (str, list, dict)))


def _numbers(value: list[Any] | dict[str, Any]) -> bool:
    """Whether it is a list that begins with a number."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], (int, float))


def _too_many(name: str, count: int, most: int) -> RequestError:
    return RequestError(name, f"holds {count} values; at most {most} are taken")


ANY = Bounds()


@functools.lru_cache(maxsize=8)
def body_bounds(task: str, max_len: int, choices: int, characters: int | None) -> Bounds:
    """The bounds of a server's bodies.

    Args:
        task: what the artifact was traced for.
        max_len: tokens that its model takes; 0 where that is not known.
        choices: prompts of one request.
        characters: of the longest text that its tokenizer is given; None without one.
    """
    ids = max(MOST_IDS, max_len)
    within = {
        "tokens": ids,
        "messages": MOST_MESSAGE_VALUES,
        "stop": MOST_STOPS,
        "chat_template_kwargs": MOST_VARIABLE_VALUES,
        "logit_bias": MOST_BIASES,
        "stream_options": MOST_STREAM_OPTIONS,
    }
    if task != "generate":  # tensors may be of any size
        within |= {"input": MOST_ELEMENTS, "inputs": MOST_ELEMENTS}
        return Bounds(entries={"input": MOST_INPUTS}, within=within, others=MOST_OTHER_VALUES)
    values = min(MOST_ELEMENTS, max(ids, choices * max_len) + SPARE_VALUES)
    return Bounds(
        values=values,
        ids=ids,
        characters=characters,
        together=("messages", "chat_template_kwargs"),  # of which the template makes one text
        entries={"prompt": max(MOST_PROMPTS, choices), "messages": MOST_MESSAGES},
        within={**within, "prompt": values},
        others=MOST_OTHER_VALUES,
    )
