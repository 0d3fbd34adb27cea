"""Read the calls of an answer that must be calls, piece by piece, as the model writes them.

The grammar of such an answer (``tool_call_rules.py``) leaves no doubt what a call is, so nothing is held back until it
is complete, as in answers that may also be text (``tool_calls.py``), and a call that is cut is returned as far as it
goes. Arguments are the text that the model has written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nxd_server.text.tool_calls import LONGEST_NAME

_HEAD = re.compile(
    r'\{"name": "([a-zA-Z0-9_.-]+)", "(?:arguments|parameters)": '
    r"|\[TOOL_CALLS\]([a-zA-Z0-9_.-]+)(?:\[CALL_ID\][a-zA-Z0-9]+)?\[ARGS\]"
)
"""What a call has before its arguments, as the grammars write it."""
_LONGEST_HEAD = LONGEST_NAME + 64
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


@dataclass(frozen=True)
class CallPiece:
    name: str
    """Of the call that begins; "" for the one that goes on."""
    arguments: str
    """What follows of the text of its JSON object."""


class ForcedCallReader:
    """Reads one answer."""

    def __init__(self) -> None:
        self._held = ""
        """Between calls: the end of what was written, in which a call may begin."""
        self._depth = 0
        """Of the brackets that are open in the arguments."""
        self._in_string = self._escaped = False
        self.inside = False
        """Whether the arguments of a call are not complete."""
        self.wrote = False
        """Whether the answer has a visible character."""

    def feed(self, text: str) -> list[CallPiece]:
        """Take the next piece; return what it adds to the calls, one for each."""
        self.wrote = self.wrote or bool(text.strip())
        found: list[CallPiece] = []
        name, place = "", 0
        while place < len(text):
            if self.inside:
                end = self._end_of_arguments(text, place)
                found.append(CallPiece(name, text[place:end]))
                name, place = "", end
                continue
            held = self._held + text[place:]
            head = _HEAD.search(held)
            if head is None:
                self._held = held[-_LONGEST_HEAD:]
                break
            name, self.inside, self._held = head[1] or head[2], True, ""
            place = len(text) - (len(held) - head.end())
        if name:
            found.append(CallPiece(name, ""))
        return found

    def _end_of_arguments(self, text: str, place: int) -> int:
        """Return where the arguments end in ``text``: behind their last brace, or with the text."""
        while place < len(text):
            if self._escaped:
                self._escaped, place = False, place + 1
                continue
            mark = (_IN_STRING if self._in_string else _STRUCTURE).search(text, place)
            if mark is None:
                break
            place = mark.end()
            if mark[0] == "\\":
                self._escaped = True
            elif mark[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark[0] in "{[" else -1
                if self._depth == 0:
                    self.inside = False
                    return place
        return len(text)
