"""Compiled graphs of earlier traces, under ``cache_dir()/graphs``: keyed by digest, verified, bounded, shared.

The digest covers graph, the backend's files beside it, options, torch and operators; the key also includes the version
of the backend's compiler. Entries are created and removed by a rename, checked file by file when used, and evicted
(least recently used first) when the total exceeds ``NXD_INFER_CACHE_LIMIT`` bytes (default 4 GiB; values such as
``500M`` and ``4G`` are accepted).
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
from nxd_infer.util.reading import checksum_of

ENTRY = "entry.json"
LIMIT = 4 << 30


def cache_limit() -> int:
    """Return ``$NXD_INFER_CACHE_LIMIT`` in bytes; 0 disables the cache. Raises TraceConfigError for an invalid size."""
    text = os.environ.get("NXD_INFER_CACHE_LIMIT", "").strip()
    size = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:I?B)?", text.upper())
    if text and not size:
        raise TraceConfigError(
            f"NXD_INFER_CACHE_LIMIT={text!r} is not a size: give bytes, or a whole number with K, M, G or T, such as 4G"
        )
    return int(size[1]) << 10 * " KMGT".index(size[2] or " ") if size else LIMIT


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
        with opened(entry / ENTRY) as file:  # rejects others' entries; it has the files' checksums
            files = json.load(file)
        for name, checksum in files.items():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(entry / name, target)
            if checksum_of(target) != checksum:
                raise ValueError(f"{name} is damaged")
        os.utime(entry / ENTRY)
    except (OSError, ValueError, AttributeError) as error:
        shutil.rmtree(copy, ignore_errors=True)
        if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):  # others say nothing of the entry
            _remove(entry)
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
    temporary = _temporary(root)
    try:
        files = {}
        for path in sorted(p for p in graph_dir.rglob("*") if p.is_file()):
            name = path.relative_to(graph_dir).as_posix()
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            files[name] = checksum_of(target)
        (temporary / ENTRY).write_text(json.dumps(files, indent=1), encoding="utf-8")
        (temporary / ENTRY).chmod(0o600)  # whatever the umask, because entries writable by others are rejected
        os.rename(temporary, entry)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
    prune()


def _temporary(root: Path) -> Path:
    return root / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"


def _remove(entry: Path) -> None:
    """Remove an entry in one step for whoever looks for it; a process that is copying it finds files missing."""
    aside = _temporary(entry.parent)
    with contextlib.suppress(OSError):
        os.rename(entry, aside)
    shutil.rmtree(aside, ignore_errors=True)


def prune(limit: int | None = None) -> None:
    """Remove the least recently used entries until the rest fits, and what killed processes left behind."""
    limit = cache_limit() if limit is None else limit
    root = _root()
    if root is None:
        return
    with contextlib.suppress(OSError):  # another process is pruning, too
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
            _remove(path)
            total -= size
