"""Write the data of these recipes, from text that comes with Python: python examples/recipes/python_text.py data

``pretrain.jsonl`` has chapters of the language reference, ``sft.jsonl`` questions about the standard library with the
first paragraph of its documentation, ``dpo.jsonl`` the same with the answer's words in a wrong order beside it.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

MODULES = (
    "argparse", "ast", "collections", "csv", "datetime", "decimal", "email", "functools", "heapq", "html", "inspect",
    "itertools", "json", "logging", "math", "os", "pathlib", "random", "re", "shutil", "socket", "statistics", "string",
    "subprocess", "tempfile", "textwrap", "threading", "types", "typing", "unittest", "urllib.parse", "uuid", "zipfile",
)  # fmt: skip


def answers() -> list[tuple[str, str]]:
    """Return questions and answers about the functions and classes of the standard library."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for member, value in sorted(vars(module).items()):
            text = inspect.getdoc(value) if callable(value) and not member.startswith("_") else None
            first = (text or "").split("\n\n")[0].strip()
            if 40 <= len(first) <= 400 and str(getattr(value, "__module__", "")).split(".")[0] == name.split(".")[0]:
                found.setdefault(first, f"What is {name}.{member}?\n")
    return [(question, answer) for answer, question in found.items()]


def write(path: Path, records: list[dict[str, str]], held_out: int) -> None:
    """Write the records, and the last ``held_out`` of them beside, to validate on."""
    for name, part in ((path, records[:-held_out]), (path.with_suffix(".val.jsonl"), records[-held_out:])):
        name.write_text("".join(json.dumps(record) + "\n" for record in part))


def main(folder: str) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    pairs = answers()
    write(out / "pretrain.jsonl", [{"text": topics[name]} for name in sorted(topics)], held_out=4)
    write(out / "sft.jsonl", [{"prompt": asked, "completion": said} for asked, said in pairs], held_out=32)
    preferences = [
        {"prompt": asked, "chosen": said, "rejected": " ".join(reversed(said.split()))} for asked, said in pairs
    ]
    write(out / "dpo.jsonl", preferences, held_out=32)
    print(f"wrote {len(pairs)} questions and {len(topics)} chapters to {out}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "data")
