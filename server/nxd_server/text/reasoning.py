"""Divide an answer into the model's reasoning and what it says, for models that think aloud between two tags.

``think`` (Qwen3, QwQ, DeepSeek R1 and its distilled models)::

    <think>
    Two and two, so add them.
    </think>

    Four.

``mistral`` (Magistral, Ministral 3 Reasoning): the same with ``[THINK]`` and ``[/THINK]``.

Some templates end the prompt with the opening tag, so that the answer begins within the reasoning; or with both tags,
so that there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from nxd_server.text.detokenize import overlap
from nxd_server.text.grammars import FreeText
from nxd_server.text.tokenizer import Tokenizer

MOST_BLANKS = 64
"""Whitespace before the opening tag; an answer with more does not reason."""


class Tags(NamedTuple):
    open: str
    close: str


FORMATS = {"think": Tags("<think>", "</think>"), "mistral": Tags("[THINK]", "[/THINK]")}

Place = Literal["before", "inside", "over"]
"""Of what comes next: the model may begin to reason, it reasons, or it reasons no more."""


def tags_of(templates: Iterable[str]) -> Tags | None:
    """Return the tags between which a model with these chat templates reasons; None if it does not."""
    text = "\n".join(templates)
    return next((tags for tags in FORMATS.values() if tags.close in text), None)


def place_behind(prompt: str, tags: Tags) -> Place:
    """Return where the answer to a rendered prompt begins."""
    end = prompt.rstrip()
    return "over" if end.endswith(tags.close) else "inside" if end.endswith(tags.open) else "before"


def free_reasoning(tokenizer: Tokenizer, vocab_size: int, tags: Tags, place: Place) -> FreeText | None:
    """Return the part of an answer from ``place`` on that no grammar constrains; None if there can be none.

    A model begins to reason with one token; a tag beyond its ``vocab_size`` tokens it cannot write.
    """
    first = tokenizer.token_to_id(tags.open)
    first = None if first is None or first >= vocab_size else first
    if place == "over" or (place == "before" and first is None):
        return None
    return FreeText(None if place == "inside" else first, tags.close, tokenizer.token_text)


class ReasoningCounter:
    """Counts the tokens of one answer that lie between the tags."""

    def __init__(self, tags: Tags, place: Place, text_of: Callable[[int], str]):
        """``place``: where the answer begins; ``text_of``: the text of a token."""
        self._tags, self._place, self._text_of = tags, place, text_of
        self._tail = ""
        self._count = self._pending = 0
        """Tokens of the reasoning, and those that may be part of the closing tag."""

    @property
    def count(self) -> int:
        """So far; what only looks like a closing tag's beginning included."""
        return self._count + (self._pending if self._place == "inside" else 0)

    def take(self, token: int) -> None:
        """Count the next token."""
        if self._place == "over":
            return
        self._tail += self._text_of(token)
        if self._place == "before":
            begun, tag = self._tail.lstrip(), self._tags.open
            if begun.startswith(tag):
                self._place, self._tail = "inside", ""
            elif not tag.startswith(begun) or len(self._tail) > MOST_BLANKS + len(tag):
                self._place = "over"
        elif self._tags.close in self._tail:
            self._place = "over"
        else:
            size = overlap(self._tail, self._tags.close)
            self._tail, self._pending = self._tail[len(self._tail) - size :], self._pending + 1
            if not size:
                self._count, self._pending = self._count + self._pending, 0


class ReasoningReader:
    """Reads one answer piece by piece, and returns (reasoning, rest). Whitespace around the reasoning is dropped, and
    the empty lines behind it."""

    def __init__(self, tags: Tags, place: Place, exact: bool = False):
        """``place``: where the answer begins. ``exact``: what comes behind the reasoning is left as it is."""
        self._tags = tags
        self._opened = place == "inside"  # by the prompt; some models write the tag again
        self.place: Place = "before" if self._opened else place
        self._exact = exact
        self._held = ""
        """What may be a tag's beginning."""
        self._blanks: list[str] = []
        """Whitespace within the reasoning, if something follows."""
        self._begun = False
        """Whether the reasoning has a visible character."""
        self._behind = False
        """Whether nothing has come yet behind the reasoning."""

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next piece."""
        thought = ""
        if self.place == "before":
            text = self._before(self._held + text)
        if self.place == "inside":
            thought, text = self._inside(self._held + text)
        if self._behind and not self._exact:
            text = text.lstrip("\r\n")
        self._behind = self._behind and not text
        return thought, text

    def end(self) -> tuple[str, str]:
        """Return what was held back."""
        held, self._held = self._held, ""
        if self.place == "inside":
            return ("".join((*self._blanks, held)) if held else ""), ""
        return (held.strip(), "") if self._opened and self.place == "before" else ("", held)

    def _before(self, text: str) -> str:
        begun = text.lstrip()
        blanks, tag = len(text) - len(begun), self._tags.open
        if blanks <= MOST_BLANKS and len(begun) < len(tag) and tag.startswith(begun):
            self._held = text
            return ""
        self._held = ""
        if blanks <= MOST_BLANKS and begun.startswith(tag):
            self.place = "inside"
            return begun[len(tag) :]
        self.place = "inside" if self._opened else "over"
        return text

    def _inside(self, text: str) -> tuple[str, str]:
        inside, tag, rest = text.partition(self._tags.close)
        keep = 0 if tag else overlap(text, self._tags.close)
        inside, self._held = inside[: len(inside) - keep], inside[len(inside) - keep :]
        if tag:
            self.place, self._behind = "over", True
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
