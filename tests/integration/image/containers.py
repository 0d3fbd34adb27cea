"""Build the Dockerfile and run its images without a daemon and without a registry: `make test-image`, as root.

No base image can be pulled here, so a Debian root with Python 3.11 (debootstrap) stands in for each. `buildah` executes
the Dockerfile's own steps on it, and what the image says of user, variables, entry point and health check is followed
in namespaces of its own: read-only root, /tmp without exec, as the image's numeric user.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from nxd_infer.util.cache_dir import cache_dir

ROOT = Path(__file__).parents[3]
PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap", "unshare": "util-linux", "chroot": "coreutils"}
"""Programs, and the Debian packages that have them."""
PYTHON = "python3,python3-venv,python3-pip,python3-dev,python-is-python3,ca-certificates"
PIP_FOLDERS = ("/opt/wheels", "/opt/pypi", "/opt/pypi-more")
BUILD_SECONDS = 1800


def missing() -> str:
    """What this machine lacks, as a sentence; empty if nothing."""
    lacking = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if os.geteuid() != 0:
        return "building images needs root: `sudo make test-image`"
    return f"apt-get install {' '.join(lacking)}" if lacking else ""


def run(*command: str | Path, **more: Any) -> str:
    """What a command printed; a failure shows its output."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


def debian_root() -> Path:
    """A Debian root with Python, made once. It takes packages from where this machine takes them."""
    place = cache_dir("image") / "bookworm"
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        source = next(line.split()[1] for line in _apt_lines() if line.startswith(("URIs:", "deb ")))
        run("debootstrap", "--variant=minbase", f"--include={PYTHON}", "bookworm", place, source, timeout=BUILD_SECONDS)
        certificates = Path("/etc/ssl/certs/ca-certificates.crt")
        if certificates.exists():
            shutil.copyfile(certificates, f"{place}{certificates}")
        links = os.environ.get("PIP_FIND_LINKS", "")
        (place / "etc/pip.conf").write_text(f"[global]\ncert = {certificates}\nfind-links = {links}\n")
        (place / "made").touch()
    return place


def _apt_lines() -> list[str]:
    files = [*sorted(Path("/etc/apt/sources.list.d").glob("*.sources")), Path("/etc/apt/sources.list")]
    return [line for file in files if file.exists() for line in file.read_text().splitlines()]


def base_image(name: str, *steps: str) -> str:
    """An image of the Debian root in which ``steps`` (lines of shell) were run; made once."""
    if (
        subprocess.run(["buildah", "inspect", "--type", "image", f"localhost/{name}"], capture_output=True).returncode
        == 0
    ):
        return f"localhost/{name}"
    container = run("buildah", "from", "scratch")
    try:
        run("cp", "-a", f"{debian_root()}/.", run("buildah", "mount", container))
        for step in steps:
            run("buildah", "run", *pip_folders(), "--isolation", "chroot", container, "--", "sh", "-ec", step)
        run("buildah", "commit", "--quiet", container, f"localhost/{name}")
    finally:
        run("buildah", "rm", container)
    return f"localhost/{name}"


def pip_folders() -> list[str]:
    """Options for folders of packages that this machine's pip looks into."""
    return [word for folder in PIP_FOLDERS if Path(folder).is_dir() for word in ("--volume", f"{folder}:{folder}:ro")]


@dataclass
class Image:
    """A target of the Dockerfile, built."""

    target: str
    base: str

    @cached_property
    def name(self) -> str:
        name = f"localhost/nxd-infer:{self.target}"
        run(
            "buildah", "build", "--quiet", "--layers", "--format", "docker", "--isolation", "chroot", *pip_folders(),
            "--target", self.target, "--build-arg", f"{self.target.upper()}_BASE={self.base}",
            "--build-arg", f"CPU_BASE={self.base}", "--tag", name, ROOT,
            timeout=BUILD_SECONDS,
        )  # fmt: skip
        return name

    @cached_property
    def config(self) -> dict[str, Any]:
        """What the image says of itself, as Docker has it."""
        return json.loads(run("buildah", "inspect", "--type", "image", self.name))["Docker"]["config"]

    @cached_property
    def root(self) -> Path:
        self.container = run("buildah", "from", self.name)
        return Path(run("buildah", "mount", self.container))

    def close(self) -> None:
        """Unmount the root; the image stays, so that the next build is quick."""
        if "root" in vars(self):
            run("buildah", "rm", self.container)

    @property
    def environment(self) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.config["Env"])


@dataclass
class Container:
    """A container of an image, running. ``mounts``: directories of this machine by their place in it, read-only where
    the place ends with ``:ro``; without one, a volume of the image is empty."""

    image: Image
    arguments: tuple[str, ...] = ()
    mounts: dict[str, Path] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __enter__(self) -> Container:
        words = [*self.image.config["Entrypoint"], *(self.arguments or self.image.config["Cmd"])]
        self.process = subprocess.Popen(
            self._command(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # and with it whatever runs inside
        self.process.wait(120)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += (line.rstrip("\n") for line in iter(self.process.stdout.readline, ""))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def _command(self, words: list[str]) -> list[str]:
        """The command that runs ``words`` in the image."""
        root = shlex.quote(str(self.image.root))
        steps = [
            "mount --make-rprivate /",
            f"mount --bind {root} {root}",
            *(f"mkdir -p {root}{place.partition(':')[0]}" for place in self.mounts),
            f"mount -o remount,bind,ro {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o nosuid,nodev,noexec,mode=1777 tmpfs {root}/tmp",  # as Docker mounts one
        ]
        for place in set(self.image.config["Volumes"]) - {place.partition(":")[0] for place in self.mounts}:
            user, group = self.image.config["User"].split(":")  # an anonymous volume, with its owner in the image
            steps += [f"mount -t tmpfs -o uid={user},gid={group},mode=755 tmpfs {root}{place}"]
        for place, directory in self.mounts.items():
            inside, _, read_only = place.partition(":")
            steps += [f"mount --bind {shlex.quote(str(directory))} {root}{inside}"]
            steps += [f"mount -o remount,bind,ro {root}{inside}"] if read_only else []
        variables = [f"{name}={value}" for name, value in {**self.image.environment, **self.environment}.items()]
        user = self.image.config["User"]
        inner = ["chroot", f"--userspec={user}", "--groups=", str(self.image.root), "env", "-i", *variables, *words]
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec",
                "; ".join([*steps, f"exec {shlex.join(inner)}"])]  # fmt: skip

    @property
    def pid(self) -> int:
        """The number that its first process, which is 1 inside, has outside."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def get(self, path: str) -> httpx.Response | None:
        """The answer to a GET; None while nobody listens."""
        port = {**self.image.environment, **self.environment}["NXD_INFER_PORT"]
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60)
        except httpx.TransportError:
            return None

    def post(self, path: str, body: Any) -> httpx.Response:
        port = {**self.image.environment, **self.environment}["NXD_INFER_PORT"]
        return httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=120)

    def wait_ready(self, seconds: float = 600) -> Container:
        end = time.monotonic() + seconds
        while (answer := self.get("/ping")) is None or answer.status_code != 200:
            assert self.process.poll() is None and time.monotonic() < end, self.log
            time.sleep(0.2)
        return self

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in this container's namespaces, as its user."""
        variables = [f"{name}={value}" for name, value in {**self.image.environment, **self.environment}.items()]
        user, group = self.image.config["User"].split(":")
        command = ["nsenter", "--target", str(self.pid), "--mount", "--pid", f"--root=/proc/{self.pid}/root",
                   f"--setuid={user}", f"--setgid={group}", "--wd=/", "env", "-i", *variables, *words]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def stop(self, seconds: float = 60) -> int:
        """As `docker stop`: SIGTERM for its first process; the exit status."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = 600) -> int:
        status = self.process.wait(seconds)
        self._reader.join(120)
        return status
