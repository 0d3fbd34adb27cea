"""The stores that fsspec knows, by URL: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``sftp://host/folder``.

Credentials, region and endpoint are those that its tools find in the environment (``AWS_ENDPOINT_URL``, say).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from nxd_infer.errors import CheckpointError

__all__ = ["URL", "connect", "typed_errors"]

URL = re.compile(r"(file|local):/+|[a-z][a-z0-9+.-]*:/")
"""How a URL begins, of which a Path keeps one slash. Group 1 is there when it names a folder of a file system."""
_OF_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
_S3_OPTIONS = {
    "config_kwargs": {
        "connect_timeout": 10,
        "read_timeout": 60,
        "request_checksum_calculation": "when_required",  # we have our own, and old servers do not know it
        "response_checksum_validation": "when_required",
    }
}


def connect(url: str) -> tuple[Any, str]:
    """The store of a URL, and the folder in it. Raises CheckpointError: no such store, no package for it, no bucket."""
    import fsspec  # slow to import: 70 ms that folders do without

    scheme = url.partition(":")[0]
    if scheme in _OF_BUCKETS and not url.partition("://")[2]:
        raise CheckpointError(f"{url!r} names no bucket; give {scheme}://bucket/prefix")
    try:
        options = _S3_OPTIONS if scheme in ("s3", "s3a") else {}
        # A store of its own for each caller: those that fsspec keeps have the credentials of their first use.
        store, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:  # its text names the package
        fix = "; pip install 'nxd-infer[s3]'" if scheme == "s3" else ""
        raise CheckpointError(f"{url} needs a package: {error}{fix}") from error
    except Exception as error:  # each store has exceptions of its own
        raise CheckpointError(f"{url}: {error}") from error
    return store, root.rstrip("/")


@contextlib.contextmanager
def typed_errors(where: str) -> Iterator[None]:
    """Raise what goes wrong at ``where`` as FileNotFoundError or CheckpointError that name it."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where} does not exist") from error
    except Exception as error:  # each store has exceptions of its own
        raise CheckpointError(f"{where}: {error}") from error
