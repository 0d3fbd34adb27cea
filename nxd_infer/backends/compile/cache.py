"""Compiled graphs of earlier traces, under ``cache_dir()/graphs``: keyed by digest, verified, bounded, shared.

The digest covers graph, the backend's files beside it, options, torch and operators; the key also includes the version
of the backend's compiler. Entries are created by a rename, checked file by file when used, and evicted (least recently
used first) when the total exceeds ``NXD_INFER_CACHE_LIMIT`` bytes (default 4 GiB; values such as ``500M`` and ``4G``
are accepted).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from nxd_infer.errors import TraceConfigError
from nxd_infer.util.cache_dir import cache_dir, opened
from nxd_infer.util.locks import only_one
from nxd_infer.util.reading import SHA256, checksum_of

ENTRY = "entry.json"
LIMIT = 4 << 30


def cache_limit() -> int:
    """Return ``$NXD_INFER_CACHE_LIMIT`` in bytes; 0 disables the cache. Raises TraceConfigError for an invalid size."""
    text = os.environ.get("NXD_INFER_CACHE_LIMIT", "").strip()
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:I?B)?", text.upper())
    if text and not found:
        raise TraceConfigError(
            f"NXD_INFER_CACHE_LIMIT={text!r} is not a size: give bytes, or a whole number with K, M, G or T, such as 4G"
        )
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ") if found else LIMIT


WAIT = 30.0
"""Seconds to wait for another process that uses the cache; after that this one continues without the cache."""


def _root() -> Path | None:
    """Return the cache's directory; None if it is not writable or the cache is disabled.

    Raises UntrustedCacheError if others could change its contents: a trace must not silently ignore that.
    """
    if not cache_limit():
        return None
    with contextlib.suppress(OSError):
        return cache_dir("graphs")
    return None


def _key(digest: str, compiler: str) -> str:
    return f"{digest}-{hashlib.sha256(compiler.encode()).hexdigest()[:8]}"


def _locked(root: Path) -> contextlib.AbstractContextManager[None]:
    """Allow one process at a time to copy or remove entries. Raises OSError after ``WAIT`` seconds."""
    return only_one(root / ".lock", WAIT)


def fetch(digest: str, graph_dir: Path, compiler: str = "") -> bool:
    """Replace ``graph_dir`` by the cached graph of ``compiler``, a backend's own (``Backend.compiler``).

    Returns False, without changes, if it is missing or damaged.
    """
    root = _root()
    if root is None:
        return False
    entry = root / _key(digest, compiler)
    copy = graph_dir.parent / f".{graph_dir.name}-{secrets.token_hex(4)}"
    try:
        with _locked(root):
            with opened(entry / ENTRY) as file:  # rejects others' entries; it has the files' checksums
                files = json.load(file)
            for name, checksum in files.items():
                target = copy / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(entry / name, target)
                if checksum_of(target, SHA256) != checksum:
                    raise ValueError(f"{name} is damaged")
            os.utime(entry / ENTRY)
    except (OSError, ValueError, AttributeError) as error:
        shutil.rmtree(copy, ignore_errors=True)
        # A full disk, or a lock held by another process, says nothing about the entry.
        if isinstance(error, (ValueError, AttributeError, FileNotFoundError)) and entry.exists():
            with contextlib.suppress(OSError), _locked(root):
                shutil.rmtree(entry, ignore_errors=True)
        return False
    shutil.rmtree(graph_dir, ignore_errors=True)
    os.rename(copy, graph_dir)
    return True


def store(digest: str, graph_dir: Path, compiler: str = "") -> None:
    """Store a graph that ``compiler`` compiled.

    An existing entry with the same key is kept; a full disk is not an error here.
    """
    root = _root()
    if root is None:
        return
    entry = root / _key(digest, compiler)
    if entry.exists():
        return
    temporary = root / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        files = {}
        for path in sorted(p for p in graph_dir.rglob("*") if p.is_file()):
            name = path.relative_to(graph_dir).as_posix()
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            files[name] = checksum_of(target, SHA256)
        (temporary / ENTRY).write_text(json.dumps(files, indent=1), encoding="utf-8")
        (temporary / ENTRY).chmod(0o600)  # whatever the umask, because entries writable by others are rejected
        os.rename(temporary, entry)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
    prune()


def prune(limit: int | None = None) -> None:
    """Remove the least recently used entries until the rest fits, and what killed processes left behind."""
    limit = cache_limit() if limit is None else limit
    root = _root()
    if root is None:
        return
    with contextlib.suppress(OSError), _locked(root):
        entries: list[tuple[float, int, Path]] = []
        for path in root.iterdir():
            if path.name.startswith(".tmp-") and time.time() - path.stat().st_mtime > 3600:
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir() and (path / ENTRY).exists():
                size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
                entries.append(((path / ENTRY).stat().st_mtime, size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= limit:
                break
            shutil.rmtree(path, ignore_errors=True)
            total -= size
