"""Build what the CPU's backend needs, unless it is built: ``python -m nxd_infer.backends.cpu``."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from nxd_infer import native
from nxd_infer.backends.cpu import program
from nxd_infer.errors import NxdError


def main() -> int:
    """Return 0 also where nothing can be built: then PyTorch's own operators do the work, and doctor says why."""
    found = native.availability()
    if not found.ok:
        print(f"not built: {found.reason}", file=sys.stderr)
        return 0
    with ThreadPoolExecutor() as pool:
        for built in [pool.submit(library.built) for library in (program.library(), native.operators())]:
            try:
                built.result()
            except NxdError as error:
                print(f"not built: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
