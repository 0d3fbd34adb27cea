"""Make a virtual environment with torch 2.9.1 and the real torch_xla 2.9.0, which runs on a CPU: for ``make test-xla``.

    python tests/integration/xla/make_rig.py .venv-xla

There is no CPU build of torch that torch_xla goes with. The usual one links CUDA's libraries, 3 GB that no CPU calls: a
few small ones are installed, and the rest are *stubs*, libraries with the same names and functions that do nothing but
report an error. Needs Linux on x86_64, a C compiler and binutils (``readelf``).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import venv
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
TORCH, TORCH_XLA = "torch==2.9.1", "torch_xla==2.9.0"
REAL = ("nvidia-cuda-runtime", "nvidia-cuda-cupti", "nvidia-cufile")
"""What ``import torch`` calls functions of."""
CUDA = re.compile(r"lib(cu|nccl|nvshmem)")
DRIVER = "libcuda.so.1"
"""Left out: torch looks for it, and finds that there is no card."""
PYTHON = re.compile(r"_?Py")
CHECK = """
import torch, torch_xla
x = torch.full((2, 2), 3.0, device=torch_xla.device())
assert (x @ x).cpu().tolist() == [[18.0, 18.0], [18.0, 18.0]]
print(f"torch {torch.__version__} and torch_xla {torch_xla.__version__} run here")
"""


def main(directory: Path) -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit(
            f"torch_xla is there for Linux on x86_64 alone, this is {sys.platform} on {platform.machine()}"
        )
    venv.create(directory, with_pip=True)
    python = str(directory / "bin" / "python")
    # Python compiles what it imports; pip would take minutes to compile everything.
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, "--no-deps", TORCH, TORCH_XLA], check=True)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    forget_cuda(next(packages.glob("torch-*.dist-info")) / "METADATA")
    subprocess.run([*pip, TORCH, TORCH_XLA, "-e", f"{ROOT}[dev]"], check=True)
    make_stubs(packages)
    subprocess.run([python, "-c", CHECK], check=True, env={**os.environ, "PJRT_DEVICE": "CPU"})


def forget_cuda(metadata: Path) -> None:
    """Take from torch's requirements what is not to be installed, so that pip is content without it."""
    unwanted = re.compile(r"Requires-Dist: (triton|nvidia-)")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not unwanted.match(line) or any(name in line for name in REAL)]
    metadata.write_text("\n".join(kept) + "\n", encoding="utf-8")


def make_stubs(packages: Path) -> None:
    """Put a stub beside torch's libraries for each library of CUDA's that they link and that is not there.

    A function that is linked without a version is looked for in every library: the first stub has all of those.
    """
    torch = packages / "torch" / "lib"
    there = {file.name for file in packages.glob("nvidia/*/lib/*.so*")} | {file.name for file in torch.iterdir()}
    missing: set[str] = set()
    defined: set[str] = set()
    wanted: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # library, version, functions
    for library in torch.glob("*.so"):
        linked = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", library))
        missing |= {name for name in linked if CUDA.match(name) and name not in {*there, DRIVER}}
        library_of = versions(readelf("-V", library))
        for line in readelf("--dyn-syms", library).splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[0].endswith(":"):
                continue
            (name, _, version), undefined = fields[7].partition("@"), fields[6] == "UND"
            if not undefined:
                defined.add(name)
            elif fields[4] != "WEAK" and not PYTHON.match(name):
                wanted[library_of.get(version, "")][version].add(name)
    if not missing:
        return
    first = min(missing)
    wanted[first][""] |= wanted[""][""] - defined
    for name in sorted(missing):
        make_stub(torch / name, wanted[name])


def readelf(what: str, library: Path) -> str:
    return subprocess.run(["readelf", "-W", what, library], check=True, capture_output=True, text=True).stdout


def versions(text: str) -> dict[str, str]:
    """Which library each version of a symbol is of, from ``readelf -V``."""
    found: dict[str, str] = {}
    library = ""
    for line in text.splitlines():
        if match := re.search(r"File: (\S+)", line):
            library = match[1]
        elif match := re.search(r"Name: (\S+)\s+Flags", line):
            found[match[1]] = library
    return found


def make_stub(library: Path, wanted: dict[str, set[str]]) -> None:
    """Compile a library of these functions by version; each returns 1, an error for every library of CUDA's."""
    source, script = library.with_name(library.name + ".c"), library.with_name(library.name + ".map")
    functions = sorted(set().union(*wanted.values()))
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in functions))
    versioned = [f"{version} {{ global: {'; '.join(sorted(wanted[version]))}; }};\n" for version in wanted if version]
    script.write_text("".join(versioned))
    options = [f"-Wl,-soname,{library.name}", *([f"-Wl,--version-script={script}"] if versioned else [])]
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-fno-builtin", *options, source, "-o", library], check=True)
    source.unlink()
    script.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
