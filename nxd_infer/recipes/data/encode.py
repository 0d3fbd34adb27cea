"""From a record to tokens, with a mark on each whether its prediction counts in the loss.

Columns mean what trl's documents say ("Dataset formats and types"), and those of ShareGPT and Alpaca what their authors
meant. A record is refused by name if it has a column that nothing here reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nxd_infer.errors import RecipeError
from nxd_infer.parallel_layers.loss_functions import IGNORED
from nxd_infer.recipes.data.sources import Record
from nxd_server.errors import RequestError
from nxd_server.text.chat_template import RESERVED, ChatTemplate, marked_tokens
from nxd_server.text.tokenizer import Tokenizer, check_text

CHAT = ("tools", "chat_template_kwargs")
FORMS = {
    ("input_ids",): ("labels", "attention_mask", "completion_mask", "assistant_masks"),
    ("messages",): CHAT,
    ("conversations",): ("system", *CHAT),
    ("prompt", "completion"): CHAT,
    ("instruction", "output"): ("input",),
    ("input", "output"): (),
    ("text",): (),
}
"""Columns of a record that is learnt by itself, and further ones that it may have."""
PAIRS = {("chosen", "rejected"): ("prompt", *CHAT)}
"""Of one whose better answer is learnt."""
ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ("system", "user", "assistant", "tool")}}
"""Of ShareGPT's messages, and what a template calls them."""
READ = ("role", "content", "name", "tool_call_id")
"""A message's fields that a template may leave out."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of one field: a template reads one of them."""
MARK = "\ue000"
"""Stands for what an assistant says, to find where a template writes it."""
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
"""Stanford Alpaca's prompt, for tokenizers without a chat template."""


@dataclass(frozen=True)
class Example:
    """Tokens, and for each whether it is predicted in the loss."""

    ids: Sequence[int]
    counts: Sequence[bool]
    lost: int | None = None
    """How many more would count, had the example not been cut; None: it was not."""


Render = Callable[..., str]


@dataclass(frozen=True)
class Encoder:
    """Turns records into examples.

    ``tokenizer`` is None for records that have tokens already. ``mask_prompt``: whether prompts do not count.
    ``length``: at most so many tokens, and ``prompt_length`` of a prompt; None: no limit. ``keep_end``: cut the start.
    ``pairs``: records are preferences. ``ignore``: columns that are left out, and fields of messages as
    ``messages.weight``, whatever column the messages are in.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | None = None
    mask_prompt: bool = True
    length: int | None = None
    prompt_length: int | None = None
    keep_end: bool = False
    pairs: bool = False
    ignore: Collection[str] = ()

    def examples(self, record: Record, number: int) -> Iterator[Example]:
        """Yield the record's example; of a preference two, the chosen one first. Raises RecipeError."""
        try:
            yield from self._examples(record)
        except (RequestError, RecipeError) as error:  # the first is of the chat template
            raise RecipeError(f"data: record {number}{'' if str(error)[0] in ' :' else ': '}{error}") from None

    def _examples(self, record: Record) -> Iterator[Example]:
        columns = {name: value for name, value in record.items() if value is not None and name not in self.ignore}
        form = self._form(columns)
        if form == ("input_ids",):
            yield _tokens(columns)
        elif form == ("text",):
            yield self._cut(self._text("", columns["text"]))
        elif form == ("chosen", "rejected"):
            prompt, *answers = _preference(columns)
            examples = [self._answer(prompt, answer, columns) for answer in answers]
            if isinstance(prompt, str):  # both count from where the tokens of one are no longer the prompt's
                start = min([*one.counts, True].index(True) for one in examples)
                examples = [Example(one.ids, [place >= start for place in range(len(one.ids))]) for one in examples]
            for name, example in zip(("chosen", "rejected"), map(self._cut_answer, examples), strict=True):
                if not any(example.counts[1:]):  # the mean over its tokens is not a number
                    raise RecipeError(f": {name} has no token that counts")
                yield example
        elif form in (("messages",), ("conversations",)):
            messages = self._messages(columns[form[0]], form[0])
            if system := columns.get("system"):  # ShareGPT's place for it, beside its own roles
                if messages and messages[0].get("role") == "system":
                    raise RecipeError(" has a column system, and a first message that is from system")
                messages = [{"role": "system", "content": check_text(system, "system")}, *messages]
            yield self._cut(self._chat(messages, columns))
        elif form == ("instruction", "output"):
            yield self._cut(self._alpaca(columns["instruction"], columns.get("input", ""), columns["output"]))
        else:
            yield self._cut(self._answer(columns[form[0]], columns[form[1]], columns))

    def _form(self, columns: Record) -> tuple[str, ...]:
        """Return the columns that say what a record is. Raises RecipeError for others, and for what they leave over."""
        forms, others = (PAIRS, FORMS) if self.pairs else (FORMS, PAIRS)
        form = next((one for one in forms if all(name in columns for name in one)), None)
        if form is None:
            if any(all(name in columns for name in one) for one in others):
                what = "no preference, as dpo and orpo need" if self.pairs else "a preference, which needs dpo or orpo"
                raise RecipeError(f" ({', '.join(columns)}) is {what}: see model_alignment_strategy")
            known = "; ".join(" and ".join(one) for one in forms)
            raise RecipeError(f" has the columns {', '.join(columns)}; known are {known}")
        left = [name for name in columns if name not in (*form, *forms[form])]
        if "label" in left and "completion" in form:
            raise RecipeError(" is an unpaired preference (label), which no recipe learns: dpo and orpo learn pairs")
        if left:
            advice = f"leave them out by data.ignore_columns=[{', '.join(left)}]"
            raise RecipeError(f" has {', '.join(left)} beside {' and '.join(form)}, which would not be read: {advice}")
        return form

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RecipeError(" is text, which needs data.tokenizer.type")
        return self.tokenizer

    def _answer(self, prompt: Any, answer: Any, columns: Record) -> Example:
        """A prompt and what follows it: texts, or lists of messages."""
        if isinstance(prompt, list) and isinstance(answer, list):
            asked = self._messages(prompt, "prompt")
            return self._chat([*asked, *self._messages(answer, "answer")], columns, first=len(asked))
        if unread := [name for name in CHAT if name in columns]:
            raise RecipeError(f" has {unread[0]}, but its prompt and answer are no lists of messages")
        return self._text(prompt, answer)

    def _alpaca(self, instruction: Any, given: Any, output: Any) -> Example:
        """An instruction, perhaps with an input: as a conversation if the tokenizer has a chat template."""
        instruction, given = check_text(instruction, "instruction"), check_text(given, "input")
        if self.template is None:
            paired = (", paired with an input that provides further context", f"### Input:\n{given}\n\n")
            about, block = paired if given else ("", "")
            return self._text(ALPACA.format(about, instruction, block), output)
        asked = f"{instruction}\n\n{given}" if given else instruction
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": check_text(output, "output")}]
        return self._chat(messages, {})

    def _text(self, prompt: Any, completion: Any) -> Example:
        prompt, completion = check_text(prompt, "the prompt"), check_text(completion, "what follows the prompt")
        tokenizer = self._tokenizer()
        encoding = tokenizer.raw.encode(prompt + completion)
        ids, counts = list(encoding.ids), [True] * len(encoding.ids)
        if self.mask_prompt and prompt:  # a token of the end of the prompt and the start of the answer counts
            same = _alike(tokenizer.raw.encode(prompt).ids, ids)
            counts = [place >= same for place in range(len(ids))]
        end = tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids, counts = [*ids, end], [*counts, True]
        elif end is not None:
            counts[-1] = True  # also if the tokenizer adds it, as a special token
        return Example(ids, counts)

    # --- conversations ----------------------------------------------------------------------------------

    def _messages(self, value: Any, column: str) -> list[dict[str, Any]]:
        """Return a column's messages, with ShareGPT's names as a template knows them."""
        if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
            raise RecipeError(f": {column} must be a list of messages, got {value!r:.80}")
        plain = []
        for message in value:
            fields = {name: one for name, one in message.items() if f"messages.{name}" not in self.ignore}
            if "from" in fields and "value" in fields:
                role = fields.pop("from")
                if not isinstance(role, str) or role not in ROLES:
                    raise RecipeError(f": a message is from {role!r}; known are {', '.join(ROLES)}")
                fields = {"role": ROLES[role], "content": fields.pop("value"), **fields}
            plain.append(fields)
        return plain

    def _chat(self, messages: list[dict[str, Any]], columns: Record, first: int = 0) -> Example:
        """A conversation; what the assistant says from message ``first`` on counts."""
        tokenizer, template = self._tokenizer(), self.template
        if template is None:
            raise RecipeError(
                " is a conversation, but the tokenizer has no chat template: put one into its tokenizer_config.json, "
                "or give prompt and completion as texts"
            )
        variables = _variables(columns)
        _require_read(template, messages, variables)
        text, spans = template.render_marked(messages, **variables)
        encoding = tokenizer.raw.encode(text, add_special_tokens=False)
        if not self.mask_prompt:
            return Example(encoding.ids, [True] * len(encoding.ids))
        if template.has_marks and not self.pairs:  # trl's preference losses know no marks
            asked = template.render_marked(messages[:first], **variables)[1] if first else ()
            spans = spans[len(asked) :]
        else:

            def render(messages: list[dict[str, Any]], asks: bool = False) -> str:
                return template.render(messages, add_generation_prompt=asks, **variables)

            said = [n for n, one in enumerate(messages) if one.get("role") == "assistant" and n >= first]
            end_of_text = template.special_tokens.get("eos_token", "")
            spans = [_span(messages, number, text, render, end_of_text) for number in said]
        return Example(encoding.ids, marked_tokens(encoding.offsets, spans))

    # --- lengths ----------------------------------------------------------------------------------------

    def _cut_answer(self, whole: Example) -> Example:
        """Cut the prompt at its length, and then the answer, of which one token stays."""
        start = whole.counts.index(True) if True in whole.counts else len(whole.ids)
        limits = (self.prompt_length, None if self.length is None else self.length - 1)
        room = min((one for one in limits if one is not None), default=start)
        asked = (slice(max(0, start - room), start) if self.keep_end else slice(min(start, room))) if room else slice(0)
        kept = len(whole.ids[asked])
        last = len(whole.ids) if self.length is None else start + max(1, self.length - kept)
        return _parts(whole, asked, slice(start, last))

    def _cut(self, example: Example) -> Example:
        if self.length is None:
            return example
        return _parts(example, slice(-self.length, None) if self.keep_end else slice(self.length))


def _parts(example: Example, *parts: slice) -> Example:
    ids = [token for part in parts for token in example.ids[part]]
    if len(ids) == len(example.ids):
        return example
    counts = [count for part in parts for count in example.counts[part]]
    return Example(ids, counts, sum(example.counts) - sum(counts))


def _tokens(columns: Record) -> Example:
    """Tokens as they are; a token counts that no column beside them leaves out."""
    ids = columns["input_ids"]
    for name, values in columns.items():
        if not isinstance(values, Sequence) or not all(type(one) is int for one in values):
            raise RecipeError(f": {name} must be a list of whole numbers, got {values!r:.60}")
        if len(values) != len(ids):
            raise RecipeError(f" has {len(ids)} input_ids and {len(values)} {name}")
    labels = columns.get("labels", ids)
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, IGNORED):
            raise RecipeError(
                f": labels[{place}] = {label} must be -100 or the token beside it, {token}: labels are not shifted"
            )
    if 0 in columns.get("attention_mask", ()):
        raise RecipeError(" has padding (attention_mask 0): give the tokens without it; rows are padded here")
    masks = [columns[name] for name in ("completion_mask", "assistant_masks") if name in columns]
    counts = [label != IGNORED for label in labels]
    return Example(ids, [count and all(marks) for count, *marks in zip(counts, *masks, strict=True)])


def _preference(columns: Record) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected; without a prompt it is what the answers begin with alike."""
    chosen, rejected = columns["chosen"], columns["rejected"]
    if not isinstance(chosen, str | list) or not isinstance(rejected, type(chosen)):
        raise RecipeError(
            f": chosen and rejected must be texts or lists of messages, got {chosen!r:.40}, {rejected!r:.40}"
        )
    if "prompt" in columns:
        if isinstance(columns["prompt"], str) != isinstance(chosen, str):
            raise RecipeError(
                " has a prompt that is a text, and answers that are messages, or the other way round: "
                "data.ignore_columns=[prompt] takes what the answers begin with alike"
            )
        prompt = columns["prompt"]
        if prompt and isinstance(prompt, list) and prompt == chosen[: len(prompt)] == rejected[: len(prompt)]:
            raise RecipeError(" has its prompt in both answers again: leave it out by data.ignore_columns=[prompt]")
        return prompt, chosen, rejected
    start = max(0, min(_alike(chosen, rejected), len(chosen) - 1, len(rejected) - 1))  # an answer is more than nothing
    if start and chosen[start - 1] == " ":  # a space belongs to the answer
        start -= 1
    return chosen[:start], chosen[start:], rejected[start:]


def _alike(first: Sequence[Any], *others: Sequence[Any]) -> int:
    """Return how many items sequences begin with alike."""
    shortest = min(map(len, (first, *others)))
    return next((n for n in range(shortest) if any(first[n] != other[n] for other in others)), shortest)


def _variables(columns: Record) -> dict[str, Any]:
    """Return what a template gets beside the messages."""
    tools, more = columns.get("tools"), columns.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise RecipeError(f": tools is not JSON: {error}") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
        raise RecipeError(f": tools must be a list of objects, or its JSON text, got {tools!r:.80}")
    if not isinstance(more, Mapping) or any(name in RESERVED for name in more):
        raise RecipeError(
            f": chat_template_kwargs must be an object without {', '.join(sorted(RESERVED))}; got {more!r:.80}"
        )
    return {**{name: value for name, value in more.items() if value is not None}, "tools": tools or None}


def _require_read(template: ChatTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> None:
    """Raise RecipeError for what a record has and its template does not name, and so leaves out."""
    given = [(name, value) for one in (*messages, variables) for name, value in one.items()]
    for name in sorted({name for name, value in given if value not in (None, "", [], {}) and name not in READ}):
        names = REASONING if name in REASONING else (name,)
        if not any(map(template.names, names)):
            column = name if name in variables else f"messages.{name}"
            raise RecipeError(
                f" has {name}, which the tokenizer's chat template leaves out: take another template, or leave it out "
                f"by data.ignore_columns=[{column}]"
            )


def _span(messages: list[dict[str, Any]], place: int, whole: str, render: Render, end_of_text: str) -> tuple[int, int]:
    """Return where in ``whole`` an assistant's message begins and ends: after what a server would have it go on from.

    Raises RecipeError where that is not certain.
    """
    if place:
        begin, end = render(messages[:place], True), render(messages[: place + 1])
        if whole.startswith(begin) and whole.startswith(end):
            return len(begin), len(end)
    # The first message, or one that is written in another way when the conversation goes on, as without its reasoning:
    # between the header of such messages, as far as a prompt has it too, and their ending.
    mark, asked = {"role": "assistant", "content": MARK}, [{"role": "user", "content": "a"}]
    prompt, last, earlier = render(asked, True), render([*asked, mark]), render([*asked, mark, *asked])
    start = _alike(prompt, last, render(asked))
    headers = (prompt[start : _alike(prompt, last)], prompt[start : _alike(prompt, earlier)])
    probe = render([*messages[:place], mark, *messages[place + 1 :]])
    ahead = [*messages[: place - 1], {**messages[place - 1], "content": MARK}] if place else []
    *_, between, _ = ("", *render([*ahead, mark, *messages[place + 1 :]]).split(MARK))  # what the message before said
    ends = [between.rfind(header) + len(header) for header in headers if header in between]
    begin = probe.find(MARK) - len(between) + max(ends, default=-len(probe))
    behind = probe.partition(MARK)[2]
    rest = len(whole) - len(behind)
    certain = probe.count(MARK) == 1 and 0 <= begin <= rest and whole[:begin] == probe[:begin]
    if certain and whole.endswith(behind):
        # At the conversation's end, without what some templates write once there, and before a further prompt.
        final = last.partition(MARK)[2]
        further = render([*asked, mark], True).partition(MARK)[2].removesuffix(prompt[_alike(prompt, render(asked)) :])
        for ending in filter(None, (final, final.removesuffix(end_of_text), further)):
            if behind.startswith(ending):
                return begin, rest + len(ending)
        if not final or not further:
            return begin, rest
    raise RecipeError(
        ": the chat template writes a conversation in another way when it goes on, so the assistant's tokens are not "
        "known: use data.mask_prompt=false, or a template with {% generation %} marks"
    )
