"""The peer's side: one JSON object a line on standard input, one a line back. Standard library only.

    -> {"op": "start", ...}      {"ok": {"version": "...", ...}}
    -> {"op": "run", "prompts": [[1, 2], [3, 4]], "new_tokens": 8}
                                 {"ok": {"tokens": [[...], [...]], "times": [[...], [...]]}}
    -> {"op": "quit"}

``times`` holds, for every row and every new token, the seconds from the call to the moment the token was known. A call
that fails is answered {"error": "..."} and the peer goes on.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def serve(make: Callable[..., Any]) -> None:
    """Answer until ``quit`` or the end of input. ``make(**arguments)`` gives the object whose methods are asked."""
    # Libraries print to standard output as they please: they get standard error, and the answers their own descriptor.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        if operation == "quit":
            break
        try:
            if operation == "start":
                engine = make(**request)
                answer = {"ok": {"version": engine.version}}
            else:
                answer = {"ok": getattr(engine, operation)(**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    close = getattr(engine, "close", None)
    if close is not None:
        close()
