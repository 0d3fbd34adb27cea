"""Measure a server under attack: latency of ``/livez``, pauses of a running stream, and leaked resources."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench import report
from bench.artifacts import artifact
from bench.attackers import ATTACKS, SPIN
from bench.client import load
from bench.model import bench_model, stamped
from bench.options import Options, home
from bench.process_groups import Group
from bench.siege import COLUMNS, GAP_STEPS, LIVEZ_SECONDS, MEMORY, Reading, Siege
from nxd_infer.artifact.manifest import Manifest
from nxd_infer.artifact.writer import CHECKSUM_KEY, hash_file, manifest_bytes
from nxd_infer.cli.demo.run import ready
from nxd_infer.util.ports import free_port

SECONDS, QUICK_SECONDS = 5.0, 1.0
DESCRIPTORS = 256
"""The server's limit of open files: fewer than the idle connections would need."""
BODY_BYTES = 16 * 2**20
"""As for a long-context model; this model's own limit is 2 MiB."""
TOKENS = 400
ADMIN = "attacked"
START_SECONDS, RECOVERY_SECONDS = 120.0, 60.0


def run(options: Options) -> None:
    tp, seconds = options.degrees[0], QUICK_SECONDS if options.quick else SECONDS
    found: list[Reading] = []
    with Attacked(_artifact(options, tp)) as server:
        load(server.port, [[5] * 100] * 4, 8)
        more = {"body_bytes": BODY_BYTES, "admin": ADMIN, "checkpoints": bench_model(options).name}
        siege = Siege(server.port, server.pid, TOKENS, **more)
        for name in options.attacks or ATTACKS:
            found.append(siege.attack(name, seconds))
            print(f"{name}: {'; '.join(found[-1].wrong()) or 'held'}", flush=True)
            server.wait(RECOVERY_SECONDS)
    title = f"Attacks on a server at tp {tp}, {seconds:g} s each"
    figures = {"tp": tp, "attacks": [_figures(reading) for reading in found]}
    report.write("attacks", title, COLUMNS, [reading.row() for reading in found], figures, settings=options.settings())
    # What happens without any attack is not the server's fault.
    if wrong := [what for reading in found if reading.attack not in ("nothing", "busy") for what in reading.wrong()]:
        bounds = f"{1e3 * LIVEZ_SECONDS:.0f} ms for /livez, {GAP_STEPS:g} steps for a stream, {MEMORY:g} of the memory"
        print(f"At most {bounds}:", *wrong, sep="\n")
        if not options.quick:
            raise SystemExit(1)


def _figures(reading: Reading) -> dict[str, Any]:
    return {
        "attack": reading.attack,
        "sent": dict(reading.tally["sent"]),
        "answers": dict(reading.tally["answers"]),
        "livez": sorted(reading.livez)[-100:],
        "gaps": sorted(reading.gaps)[-100:],
        "step": reading.step,
        "cut": reading.cut,
        "before": vars(reading.before),
        "after": vars(reading.after),
    }


class Attacked(Group):
    """The server in a process group, with few descriptors."""

    def __init__(self, artifact: Path):
        self.port = free_port()
        settings = {
            "port": self.port, "admin_key": ADMIN, "weights_root": home() / "models", "max_body_bytes": BODY_BYTES,
            "header_timeout": 2, "max_restarts": 1000, "access_log": False,
        }  # fmt: skip
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "nxd_server", str(artifact), *options]
        limited = ["sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh", *command]
        super().__init__(limited, home() / "logs" / "attacked.log")
        self.wait(START_SECONDS)

    def wait(self, seconds: float) -> None:
        """Wait until the server is ready; SystemExit on timeout."""
        end = time.monotonic() + seconds
        while not ready(self.port):
            if not self.alive() or time.monotonic() > end:
                text = self.tail()
                self.kill()
                raise SystemExit(f"the server is not ready after {seconds:g} s:\n{text}")
            time.sleep(0.02)


def _artifact(options: Options, tp: int) -> Path:
    """Return the artifact of the other benchmarks, with a chat template that can loop endlessly."""
    source = artifact(options, tp)

    def make(path: Path) -> None:
        shutil.copytree(source, path, copy_function=os.link)
        for name in ("tokenizer_config.json", "manifest.json"):
            (path / name).unlink()  # do not change the source's file
        found = json.loads((source / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(
            json.dumps({**found, "chat_template": found["chat_template"] + SPIN})
        )
        fields = json.loads((source / "manifest.json").read_text())
        manifest = Manifest.model_validate({name: value for name, value in fields.items() if name != CHECKSUM_KEY})
        manifest.files["tokenizer_config.json"] = hash_file(path / "tokenizer_config.json")
        (path / "manifest.json").write_bytes(manifest_bytes(manifest))

    key = source.with_name(source.name + ".stamp").read_text() + SPIN
    return stamped(source.with_name(f"attacked-{source.name}"), key, make)
