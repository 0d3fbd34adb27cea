"""Build a wheel that carries the native operators, so that who installs it needs no C++ compiler: ``make wheel``.

The operators choose their instructions where they run, and are for one release of torch: the one that this Python has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600.0
"""How long pip, and what packs the wheel, may take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder for the wheel")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        _run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", plain, ROOT)
        (wheel,) = plain.glob("*.whl")
        _run("wheel", "unpack", "--dest", scratch, wheel)
        (content,) = Path(scratch).glob("nxd_infer-*")
        _run("nxd_infer.backends.cpu", "--prebuilt", cwd=content)  # of the package that lies there
        (told,) = content.glob("*.dist-info/WHEEL")
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        text = told.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        told.write_text(text.replace("Tag: py3-none-any", f"Tag: py3-none-{platform}"))
        _run("wheel", "pack", "--dest-dir", out, content)


def _run(*command: object, cwd: Path | None = None) -> None:
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True, timeout=SECONDS, cwd=cwd)


if __name__ == "__main__":
    main()
