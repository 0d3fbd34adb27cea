"""What a file holds that is worth changing: JSON in all of them, with something around it, or bytes alone."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any, Protocol

import yaml


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


class Lines:
    """JSON, a value per line."""

    def open(self, example: bytes) -> Any:
        return [json.loads(line) for line in example.splitlines() if line.strip()]

    def close(self, example: bytes, inner: Any) -> bytes:
        return b"\n".join(map(dumped, inner if isinstance(inner, list) else [inner]))


class Yaml:
    """A recipe's text, as the values that YAML makes of it."""

    def open(self, example: bytes) -> Any:
        try:
            return yaml.safe_load(example)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from error

    def close(self, example: bytes, inner: Any) -> bytes:
        return yaml.safe_dump(inner, sort_keys=False, allow_unicode=True).encode()


class Indexed:
    """Megatron's index with the tokens behind it, as :func:`indexed` joins them; the numbers of the index as JSON."""

    def open(self, example: bytes) -> Any:
        index, tokens = parted(example)
        try:
            _, version, code, count, documents = _INDEX.unpack_from(index)
            whole = struct.unpack_from(f"<{count}i{count}q{documents}q", index, _INDEX.size) if count < 10000 else ()
        except struct.error as error:
            raise ValueError(str(error)) from error
        parts = [list(whole[at : at + size]) for at, size in ((0, count), (count, count), (2 * count, documents))]
        return [version, code, count, documents, *parts, list(tokens)]

    def close(self, example: bytes, inner: Any) -> bytes:
        try:
            version, code, count, documents, lengths, starts, first, tokens = inner
            index = _INDEX.pack(b"MMIDIDX\0\0", version, code, count, documents)
            index += struct.pack(f"<{len(lengths)}i", *lengths)
            index += b"".join(struct.pack(f"<{len(one)}q", *one) for one in (starts, first))
            return indexed(index, bytes(tokens))
        except (TypeError, struct.error) as error:
            raise ValueError(str(error)) from error


_INDEX = struct.Struct("<9sQBQQ")


def indexed(index: bytes, tokens: bytes) -> bytes:
    """Join both files into one example."""
    return struct.pack("<Q", len(index)) + index + tokens


def parted(example: bytes) -> tuple[bytes, bytes]:
    """Return both files of an example."""
    (length,) = struct.unpack_from("<Q", example.ljust(8, b"\0"))
    return example[8 : 8 + length], example[8 + length :]


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
LINES, YAML, INDEXED = Lines(), Yaml(), Indexed()
