"""Build what the CPU's backend needs, unless it is built: ``python -m nxd_infer.backends.cpu [--prebuilt]``."""

from __future__ import annotations

import argparse
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

from nxd_infer import native
from nxd_infer.backends.cpu import program
from nxd_infer.errors import NxdError
from nxd_infer.native import FILE, PREBUILT


def main() -> int:
    """Return 0 also where nothing can be built: then PyTorch's own operators do the work, and doctor says why. With
    ``--prebuilt`` that is an error."""
    parser = argparse.ArgumentParser(prog="python -m nxd_infer.backends.cpu", description=__doc__)
    parser.add_argument("--prebuilt", action="store_true", help="keep it in the package instead of the cache")
    prebuilt: bool = parser.parse_args().prebuilt
    available = native.availability()
    if not available.ok:
        print(f"not built: {available.reason}", file=sys.stderr)
        return int(prebuilt)
    failed = False
    with ThreadPoolExecutor() as pool:
        libraries = program.library(), native.operators()
        for library, built in [(library, pool.submit(library.built)) for library in libraries]:
            try:
                path = built.result()
            except NxdError as error:
                print(f"not built: {error}", file=sys.stderr)
                failed = True
                continue
            if prebuilt and PREBUILT not in path.parents:
                (PREBUILT / library.hash).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, PREBUILT / library.hash / FILE)
    return int(failed and prebuilt)


if __name__ == "__main__":
    sys.exit(main())
