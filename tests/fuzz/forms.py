"""What a file holds that is worth changing: JSON in all of them, with something around it, or bytes alone."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any, Protocol


class Form(Protocol):
    """How an example is taken apart and put together, so that changes get past its outermost checks."""

    def open(self, example: bytes) -> Any:
        """The JSON value within, or bytes; ValueError where it holds none."""
        ...

    def close(self, example: bytes, inner: Any) -> bytes:
        """``example`` with another value within."""
        ...


def dumped(value: Any) -> bytes:
    """JSON, with whatever Python would write besides (``NaN``, lone surrogates)."""
    return json.dumps(value).encode()


class Json:
    """JSON and nothing else."""

    def open(self, example: bytes) -> Any:
        return json.loads(example)

    def close(self, example: bytes, inner: Any) -> bytes:
        return dumped(inner)


class Safetensors:
    """The header of a safetensors file; its length is told anew."""

    def open(self, example: bytes) -> Any:
        (length,) = struct.unpack_from("<Q", example.ljust(8, b"\0"))
        return json.loads(example[8 : 8 + length])

    def close(self, example: bytes, inner: Any) -> bytes:
        (length,) = struct.unpack_from("<Q", example)
        header = dumped(inner)
        return struct.pack("<Q", len(header)) + header + example[8 + length :]


class TorchFile:
    """The pickle in a file of ``torch.save``, as bytes; the zip around it is made anew, with its checksums."""

    def open(self, example: bytes) -> Any:
        try:
            with zipfile.ZipFile(io.BytesIO(example)) as file:
                return file.read(self._pickle(file))
        except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError) as error:
            raise ValueError(str(error)) from error

    def close(self, example: bytes, inner: Any) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(example)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
            for name in old.namelist():
                new.writestr(name, inner if name == self._pickle(old) else old.read(name))
        return out.getvalue()

    @staticmethod
    def _pickle(file: zipfile.ZipFile) -> str:
        return next((name for name in file.namelist() if name.endswith("/data.pkl")), "")


JSON, SAFETENSORS, TORCH_FILE = Json(), Safetensors(), TorchFile()
