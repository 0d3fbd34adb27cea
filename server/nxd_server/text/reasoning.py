"""Divide an answer into the model's reasoning and what it says, for models that think aloud between two tags.

``<think>`` (Qwen3, QwQ, DeepSeek R1 and its distilled models)::

    <think>
    Two and two, so add them.
    </think>

    Four.

Some templates end the prompt with the opening tag, so that the answer begins within the reasoning; or with both tags,
so that there is none.
"""

from __future__ import annotations

from collections.abc import Iterable

from nxd_server.text.grammars import FreeText
from nxd_server.text.tags import overlap
from nxd_server.text.tokenizer import Tokenizer

OPEN, CLOSE = TAGS = ("<think>", "</think>")
MOST_BLANKS = 64
"""Whitespace before the opening tag; an answer with more does not reason."""


def reasons(templates: Iterable[str]) -> bool:
    """Whether a model with these chat templates thinks aloud."""
    return any(CLOSE in template for template in templates)


def begins_in_reasoning(prompt: str) -> bool | None:
    """Whether the answer to a rendered prompt begins within the reasoning. False: there is none; None: the model begins
    it or does not."""
    end = prompt.rstrip()
    if end.endswith(CLOSE):
        return False
    return True if end.endswith(OPEN) else None


def free_reasoning(tokenizer: Tokenizer, begun: bool) -> FreeText | None:
    """Return the part of an answer that no grammar constrains; None if the tags are no tokens of ``tokenizer``."""
    first, last = (tokenizer.raw.token_to_id(tag) for tag in (OPEN, CLOSE))
    return None if first is None or last is None else FreeText(first, last, begun)


class ReasoningReader:
    """Reads one answer piece by piece, and returns (reasoning, rest). Whitespace around the reasoning is dropped."""

    def __init__(self, begun: bool):
        """``begun``: the prompt has opened the reasoning."""
        self._place = "inside" if begun else "before"
        self._held = ""
        """What may be a tag's beginning."""
        self._blanks: list[str] = []
        """Whitespace within the reasoning, if something follows."""
        self._begun = False
        """Whether the reasoning has a visible character."""

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece."""
        thought = ""
        if self._place == "before":
            text = self._before(self._held + text)
        if self._place == "inside":
            thought, text = self._inside(self._held + text)
        if self._place == "behind":
            text = text.lstrip()
            self._place = "over" if text else "behind"
        return thought, text

    def end(self) -> tuple[str, str]:
        """Return what was held back."""
        held, self._held = self._held, ""
        return ("".join((*self._blanks, held)), "") if held and self._place == "inside" else ("", held)

    def _before(self, text: str) -> str:
        begun = text.lstrip()
        blanks = len(text) - len(begun)
        if blanks <= MOST_BLANKS and len(begun) < len(OPEN) and OPEN.startswith(begun):
            self._held = text
            return ""
        self._held = ""
        if blanks > MOST_BLANKS or not begun.startswith(OPEN):
            self._place = "over"
            return text
        self._place = "inside"
        return begun[len(OPEN) :]

    def _inside(self, text: str) -> tuple[str, str]:
        inside, tag, rest = text.partition(CLOSE)
        keep = 0 if tag else overlap(text, CLOSE)
        inside, self._held = inside[: len(inside) - keep], inside[len(inside) - keep :]
        self._place = "behind" if tag else "inside"
        visible = inside.rstrip()
        blanks = inside[len(visible) :]
        if not self._begun:
            visible = visible.lstrip()
        if not visible:
            if self._begun:
                self._blanks.append(blanks)
            return "", rest
        thought = "".join((*self._blanks, visible))
        self._blanks, self._begun = [blanks], True
        return thought, rest
