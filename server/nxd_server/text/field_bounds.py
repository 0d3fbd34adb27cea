"""How much each field of a body may hold, checked where it is parsed, so that no more reaches the server.

The content of a large body is built twice: by the parser in a separate process, and by the server from the parser's
answer. The second time blocks every request, as does any code that visits the values. So a body that no route would
accept is rejected in the first process.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_server.errors import RequestError, TextTooLongError

MOST_ELEMENTS = 2**19
"""Most values of a body, for any model: enough for 64 prompts of the longest lists of token ids."""
MOST_IDS = 2**16
"""Token ids in one list, unless the model's maximum length is larger."""
MOST_PROMPTS, MOST_INPUTS = 1024, 2048
"""Texts per request, checked before they are read; MOST_INPUTS for encoders, the same as OpenAI's limit."""
MOST_MESSAGES, MOST_MESSAGE_VALUES = 4096, 2**15
MOST_STOPS = 1024
MOST_VARIABLE_VALUES = 4096
"""Values in all of a template's variables."""
MOST_TOOL_VALUES = 2**14
"""Values in the schemas of all tools."""
MOST_BIASES, MOST_STREAM_OPTIONS = 4096, 64
"""The engine checks how many biases a graph takes; no graph takes this many."""
MOST_OTHER_VALUES = 2**13
"""Values in any other field: adapters' names, biases, ignored fields."""
SPARE_VALUES = 2**14
"""Values in a body in addition to its prompts."""


@dataclass(frozen=True)
class Bounds:
    """The limits of a body; None: limited only by its size."""

    values: int = MOST_ELEMENTS
    """Numbers, texts, lists and objects in the body."""
    ids: int | None = None
    """Numbers in one list."""
    characters: int | None = None
    """Of one text, or of all texts in the fields of ``together``."""
    together: Sequence[str] = ()
    entries: Mapping[str, int] = field(default_factory=dict)
    """Most entries per field, at its top level. A list of numbers is one entry."""
    within: Mapping[str, int] = field(default_factory=dict)
    """Most values per field, at all depths."""
    others: int | None = None
    """Like ``within``, for the fields that it does not name."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise RequestError naming the field that holds too much; TextTooLongError for a text or ids."""
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
    """Whether ``value`` is a list that begins with a number."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], (int, float))


def _too_many(name: str, count: int, most: int) -> RequestError:
    return RequestError(name, f"holds {count} values; at most {most} are taken")


ANY = Bounds()


@functools.lru_cache(maxsize=8)
def body_bounds(task: str, max_len: int, choices: int, characters: int | None) -> Bounds:
    """Return the bounds of a server's request bodies.

    Args:
        task: what the artifact was traced for.
        max_len: the model's maximum length in tokens; 0 if unknown.
        choices: most prompts per request.
        characters: of the longest text that the tokenizer reads; None without a tokenizer.
    """
    ids = max(MOST_IDS, max_len)
    within = {
        "tokens": ids,
        "messages": MOST_MESSAGE_VALUES,
        "stop": MOST_STOPS,
        "chat_template_kwargs": MOST_VARIABLE_VALUES,
        "tools": MOST_TOOL_VALUES,
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
        together=("messages", "chat_template_kwargs", "tools"),  # the template joins them in one text
        entries={"prompt": max(MOST_PROMPTS, choices), "messages": MOST_MESSAGES},
        within={**within, "prompt": values},
        others=MOST_OTHER_VALUES,
    )
