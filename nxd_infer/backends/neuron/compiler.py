"""neuronx-cc by its documented command line: HLO in, a NEFF out. It needs no device, and any machine can run it."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess  # nosec B404
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_infer.backends.base import WORDS
from nxd_infer.backends.neuron.cores import DEGREES
from nxd_infer.backends.neuron.sdk import INSTALL
from nxd_infer.errors import BackendUnavailableError, TraceConfigError, TraceError

PROGRAM, VERSION = "neuronx-cc", "--version"
OLDEST = (2, 24)
"""That of SDK 2.29, the first one for torch 2.9 alone."""
INPUT, NEFF, LOG, COMMAND = "neuron.hlo", "graph.neff", "neuronx-cc.log", "neuronx-cc.txt"
KEPT = (INPUT, NEFF, LOG, COMMAND)
"""What ``compiler_workdir`` gets of each graph."""
_OURS = {
    "--framework": "it is XLA",
    "--output": "the artifact keeps the NEFF",
    "-o": "the artifact keeps the NEFF",
    "compile": "that is what is done",
}
PINNED = {"--auto-cast": "none"}
"""What is given where the user gives nothing: their defaults change from release to release, and results with them."""
_SECONDS = 60
_WITHOUT_MEMORY = "most likely for want of memory: compile on a machine with more"
_OWN_FAULT = (
    "which is a fault of its own and not of the model (SDK 2.27 does so with some encoders): try another SDK, or other "
    "compiler_args"
)


def version() -> str:
    """The compiler's version. Raises BackendUnavailableError where there is none, or it is too old, or does not run."""
    program = _found()
    try:
        done = subprocess.run(  # nosec B603
            [program, VERSION], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(f"{program} does not run: {error}") from error
    found = re.search(r"version (\d+)\.(\d+)\S*", done.stdout + done.stderr)
    if done.returncode or not found:
        said = (done.stdout + done.stderr).strip()[-200:]
        raise BackendUnavailableError(f"{program} {VERSION} {_ended(done.returncode)}: {said or 'it said nothing'}")
    if (int(found[1]), int(found[2])) < OLDEST:
        raise BackendUnavailableError(
            f"{PROGRAM} {found[0].removeprefix('version ')} is of an SDK for another torch: {INSTALL}"
        )
    return found[0].removeprefix("version ")


def _found() -> str:
    program = shutil.which(PROGRAM)
    if program is None:
        raise BackendUnavailableError(f"the compiler {PROGRAM} was not found: {INSTALL}; it needs no Neuron device")
    return program


@dataclass(frozen=True)
class Arguments:
    """The user's words for neuronx-cc, as they were given, without those that say the target."""

    target: str
    words: list[str]


def read_arguments(words: Sequence[str], target: str) -> Arguments:
    """Take the target out of ``words``; ``target`` is what else was said of it, or empty.

    Raises TraceConfigError for a word that this package says itself, or two targets.
    """
    rest: list[str] = []
    chosen = [target] if target else []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        name, equals, value = word.partition("=")
        if name in _OURS:
            raise TraceConfigError(f"compiler_args: {name} is set by this package ({_OURS[name]}): leave it out")
        if name == "--target":
            chosen.append(value if equals else pending.pop(0) if pending else "")
        else:
            rest.append(word)
    for each in chosen:
        if each not in DEGREES:
            raise TraceConfigError(f"compiler_args: there is no target {each!r}: give one of {', '.join(DEGREES)}")
    if len(set(chosen)) > 1:
        raise TraceConfigError(
            f"compiler_args: the targets {' and '.join(sorted(set(chosen)))} are both given: leave one out"
        )
    return Arguments(chosen[0] if chosen else "", rest)


def command(target: str, words: Sequence[str]) -> list[str]:
    """The command line. Files are in the directory in which it runs, so it tells nothing of this machine."""
    given = {word.partition("=")[0] for word in words}
    pinned = [f"{name}={value}" for name, value in PINNED.items() if name not in given]
    line = [PROGRAM, "compile", INPUT, "--framework", "XLA", "--target", target]
    return [*line, *pinned, *map(_unquoted, words), "--output", NEFF]


def _unquoted(word: str) -> str:
    """Without the quotation marks that kept a word together in a text of several."""
    return "".join(shlex.split(word)) if ("'" in word or '"' in word) else word


def compile_here(directory: Path, options: Mapping[str, Any]) -> None:
    """Compile the HLO in ``directory`` to a NEFF beside it, with the command and what the compiler printed.

    It runs in a directory of its own among the temporary files. Its log (``log-neuron-cc.txt``) stays there, and what
    its debugging options ask for: all that is in ``directory`` goes into the artifact, and into the cache.

    Raises TraceError: it ended with an error, or by a signal, or left no NEFF.
    """
    line = command(options["target"], options[WORDS])
    (directory / COMMAND).write_text(shlex.join(line) + "\n", encoding="utf-8")
    place = Path(tempfile.mkdtemp(prefix=f"neuronx-cc-{directory.name[:8]}-"))
    shutil.copyfile(directory / INPUT, place / INPUT)
    with open(directory / LOG, "wb") as log:
        done = subprocess.run(  # nosec B603
            [_found(), *line[1:]],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    said = (directory / LOG).read_text(errors="replace").strip()[-2000:]
    sys.stderr.write(said + "\n")
    if killed := _signal(done.returncode):
        why = _WITHOUT_MEMORY if killed == signal.SIGKILL.name else _OWN_FAULT
        raise TraceError(f"{PROGRAM} {_ended(done.returncode)}, {why}; its command was {shlex.join(line)}\n{said}")
    if done.returncode or not (place / NEFF).is_file():
        raise TraceError(
            f"{PROGRAM} {_ended(done.returncode)}{'' if done.returncode else ' and wrote no NEFF'}: see what it said, "
            f"and keep its files with compiler_workdir; its command was {shlex.join(line)}\n{said}"
        )
    shutil.move(place / NEFF, directory / NEFF)


def _signal(code: int) -> str:
    """The signal that ended the program, or a program that it had started (128 and its number); empty if none did."""
    number = -code if code < 0 else code - 128
    known = next((each.name for each in signal.Signals if each == number), "")
    return known or (f"signal {number}" if code < 0 else "")


def _ended(code: int) -> str:
    found = _signal(code)
    if code < 0:
        return f"was ended by {found}"
    return f"ended with status {code}{f', as a program of its own was ended by {found}' if found else ''}"
