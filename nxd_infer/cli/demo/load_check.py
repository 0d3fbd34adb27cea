"""A program that loads an artifact in a fresh process, runs each graph once, and prints the times as JSON."""

from __future__ import annotations

import json
import sys
import time

from nxd_infer import trace


def main(directory: str) -> None:
    start = time.monotonic()

    with trace.parallel_model_load(directory) as model:
        model.start()
        loaded = time.monotonic()
        model.warmup()
        figures = {
            "load_seconds": loaded - start,
            "warmup_seconds": time.monotonic() - loaded,
            "model_code_imported": "nxd_models" in sys.modules,
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
