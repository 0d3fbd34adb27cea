"""From a record to tokens, with a mark on each whether its prediction counts in the loss.

A record has one of these sets of columns: ``input_ids`` (and ``labels``); ``messages``; ``prompt`` and ``completion``,
or ``input`` and ``output``; ``prompt``, ``chosen`` and ``rejected``; ``text``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_infer.errors import RecipeError
from nxd_infer.parallel_layers.loss_functions import IGNORED
from nxd_infer.recipes.data.sources import Record
from nxd_server.errors import RequestError
from nxd_server.text.chat_template import ChatTemplate
from nxd_server.text.tokenizer import Tokenizer, check_text

COLUMNS = (
    ("input_ids",),
    ("prompt", "chosen", "rejected"),
    ("messages",),
    ("prompt", "completion"),
    ("input", "output"),
    ("text",),
)


@dataclass(frozen=True)
class Example:
    """Tokens, and for each whether it is predicted in the loss."""

    ids: Sequence[int]
    counts: Sequence[bool]


@dataclass(frozen=True)
class Encoder:
    """Turns records into examples.

    ``tokenizer`` is None for records that have tokens already. ``mask_prompt``: whether prompts do not count.
    ``length``: at most so many tokens, and ``prompt_length`` of a prompt; None: no limit. ``keep_end``: cut the start.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | None = None
    mask_prompt: bool = True
    length: int | None = None
    prompt_length: int | None = None
    keep_end: bool = False

    def examples(self, record: Record, number: int) -> Iterator[Example]:
        """Yield the record's example; of a preference two, the chosen one first. Raises RecipeError."""
        try:
            yield from self._examples(record, number)
        except RequestError as error:  # of the chat template: messages in another form
            raise RecipeError(f"data: record {number}: {error}") from None

    def _examples(self, record: Record, number: int) -> Iterator[Example]:
        columns = next((one for one in COLUMNS if all(record.get(name) is not None for name in one)), None)
        if columns is None:
            known = "; ".join(" and ".join(one) for one in COLUMNS)
            raise RecipeError(f"data: record {number} has the columns {', '.join(record)}; known are {known}")
        if columns == ("input_ids",):
            yield self._tokens(record, number)
        elif columns == ("messages",):
            yield self._cut(self._chat(record["messages"], number))
        elif columns == ("text",):
            yield self._cut(self._pair("", check_text(record["text"], "text"), number))
        elif len(columns) == 2:
            prompt, completion = (record[name] for name in columns)
            yield self._cut(self._pair(prompt, completion, number))
        else:
            for answer in ("chosen", "rejected"):
                yield self._preference(record["prompt"], record[answer], number)

    def _tokens(self, record: Record, number: int) -> Example:
        ids, labels = record["input_ids"], record.get("labels")
        for name, given in (("input_ids", ids), ("labels", labels)):
            fits = isinstance(given, Sequence) and all(type(one) is int for one in given)
            if given is not None and not fits:
                raise RecipeError(f"data: record {number}: {name} must be a list of whole numbers, got {given!r:.60}")
        if labels is None:
            return Example(ids, [True] * len(ids))
        if len(labels) != len(ids):
            raise RecipeError(f"data: record {number} has {len(ids)} input_ids and {len(labels)} labels")
        for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
            if label not in (token, IGNORED):
                raise RecipeError(
                    f"data: record {number}: labels[{place}] = {label} must be -100 or the token beside it, {token}: "
                    "labels are not shifted"
                )
        return Example(ids, [label != IGNORED for label in labels])

    def _text(self, number: int) -> Tokenizer:
        if self.tokenizer is None:
            raise RecipeError(f"data: record {number} is text, which needs data.tokenizer.type")
        return self.tokenizer

    def _pair(self, prompt: Any, completion: Any, number: int) -> Example:
        """A prompt and what follows it: texts, or lists of messages."""
        if isinstance(prompt, Sequence) and isinstance(completion, Sequence) and not isinstance(prompt, str):
            return self._chat([*prompt, *completion], number, first=len(prompt))
        prompt, completion = check_text(prompt, "the prompt"), check_text(completion, "what follows the prompt")
        tokenizer = self._text(number)
        encoding = tokenizer.raw.encode(prompt + completion)
        ids = list(encoding.ids)
        counts = [end > len(prompt) or not prompt for _, end in encoding.offsets]
        if self.mask_prompt and prompt:  # a token of the end of the prompt and the start of the answer counts
            special = zip(encoding.special_tokens_mask, counts, strict=True)
            counts = [count and not mark for mark, count in special]
        else:
            counts = [True] * len(ids)
        end = tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids, counts = [*ids, end], [*counts, True]
        elif end is not None:
            counts[-1] = True  # also if the tokenizer adds it, as a special token
        return Example(ids, counts)

    def _chat(self, messages: Any, number: int, first: int = 0) -> Example:
        """A conversation; what the assistant says from message ``first`` on counts."""
        tokenizer = self._text(number)
        if self.template is None:
            raise RecipeError(
                f"data: record {number} is a conversation, but the tokenizer has no chat template: put one into its "
                "tokenizer_config.json, or give prompt and completion as texts"
            )
        whole = self.template.render(messages, add_generation_prompt=False)
        encoding = tokenizer.raw.encode(whole, add_special_tokens=False)
        if not self.mask_prompt:
            return Example(encoding.ids, [True] * len(encoding.ids))
        spans = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant" or place < first:
                continue
            before = self.template.render(messages[:place], add_generation_prompt=True) if place else ""
            after = self.template.render(messages[: place + 1], add_generation_prompt=False)
            if not whole.startswith(before) or not whole.startswith(after):
                raise RecipeError(
                    f"data: record {number}: the chat template writes a conversation in another way when it goes on, "
                    "so the assistant's tokens are not known: use data.mask_prompt=false"
                )
            spans.append((len(before), len(after)))
        counts = [any(low < end <= high for low, high in spans) for _, end in encoding.offsets]
        return Example(encoding.ids, counts)

    def _preference(self, prompt: Any, answer: Any, number: int) -> Example:
        found = self._pair(prompt, answer, number)
        start = found.counts.index(True) if True in found.counts else len(found.ids)
        asked, said = list(found.ids[:start]), list(found.ids[start:])
        limits = (self.prompt_length, None if self.length is None else self.length - 1)  # room for an answer
        most = min((one for one in limits if one is not None), default=len(asked))
        if len(asked) > most:
            asked = asked[-most:] if self.keep_end else asked[:most]
        if self.length is not None:
            said = said[: max(1, self.length - len(asked))]
        return Example([*asked, *said], [False] * len(asked) + [True] * len(said))

    def _cut(self, example: Example) -> Example:
        if self.length is None or len(example.ids) <= self.length:
            return example
        part = slice(-self.length, None) if self.keep_end else slice(self.length)
        return Example(example.ids[part], example.counts[part])
