"""The peer's side: one JSON object per line on standard input, and one per line back. Standard library only.

    -> {"op": "start", ...}      {"ok": {"version": "...", ...}}
    -> {"op": "run", "prompts": [[1, 2], [3, 4]], "new_tokens": 8}
                                 {"ok": {"tokens": [[...], [...]], "times": [[...], [...]]}}
    -> {"op": "quit"}

``times`` has, for every row and every new token, the seconds from the call until the token was known. A failed call is
answered with {"error": "..."}, and the peer continues.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def serve(make: Callable[..., Any]) -> None:
    """Answer requests until ``quit`` or end of input. ``make(**arguments)`` returns the object to call."""
    # Libraries print to standard output: redirect that to standard error, and give answers their own descriptor.
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
