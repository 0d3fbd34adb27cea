"""Records of the files that a recipe names: each a mapping such as ``{"text": ...}`` or ``{"messages": [...]}``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nxd_infer.errors import MissingPackageError, RecipeError

TEXTS = (".txt", ".md", ".rst", ".py")
LINES = (".jsonl", ".json")
TABLES = (".parquet", ".arrow")
SAVED = ("state.json", "dataset_dict.json")
"""A file of these names makes a folder a dataset that Hugging Face's ``save_to_disk`` wrote."""

Record = Mapping[str, Any]


def files_of(path: Path) -> list[Path]:
    """Return the files that :func:`records` reads, sorted; a saved dataset stands for itself.

    Raises RecipeError if there are none.
    """
    if path.is_file() or is_saved(path):
        return [path]
    known = (*TEXTS, *LINES, *TABLES)
    found = sorted(one for one in path.rglob("*") if one.suffix in known and one.is_file()) if path.is_dir() else []
    if not found:
        problem = f"has no file of {', '.join(known)}" if path.is_dir() else "is not there"
        raise RecipeError(f"data: {path} {problem}: give a file, a folder of files, or a dataset saved to disk")
    return found


def is_saved(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in SAVED)


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, of all files of a folder, or of a saved dataset (its split ``train``, or its first).

    Raises RecipeError naming the file, and the line of one of JSON.
    """
    for file in files_of(path):
        if is_saved(file):
            yield from _saved(file)
        elif file.suffix in TABLES:
            yield from _table(file)
        elif file.suffix in LINES:
            yield from _json(file)
        elif file.suffix in TEXTS:
            yield {"text": _text(file)}
        else:
            known = ", ".join((*TEXTS, *LINES, *TABLES))
            raise RecipeError(f"data: {file} is of no kind that is read: {known}, or a dataset saved to disk")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError as error:
        raise RecipeError(f"data: {file} is not UTF-8: {error.reason} at byte {error.start}") from None


def _json(file: Path) -> Iterator[Record]:
    """A JSON file is a list of records, or has one per line."""
    text = _text(file) if file.suffix == ".json" else ""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"data: {file} is not JSON: {error}") from None
        yield from (_record(one, file, number) for number, one in enumerate(found, 1))
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecipeError(f"data: {file}:{number} is not JSON: {error}") from None
            yield _record(value, file, number)


def _record(value: Any, file: Path, number: int) -> Record:
    if not isinstance(value, dict):
        raise RecipeError(f"data: {file}:{number} is a record of type {type(value).__name__}, not an object")
    return value


def _datasets() -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise MissingPackageError(
            "Parquet, Arrow and saved datasets need the package datasets: pip install 'nxd-infer[recipes]'",
            name="datasets",
        ) from None
    return datasets


def _table(file: Path) -> Iterator[Record]:
    datasets = _datasets()
    try:
        kind = datasets.Dataset
        yield from (kind.from_parquet if file.suffix == ".parquet" else kind.from_file)(str(file))
    except (ValueError, OSError, datasets.exceptions.DatasetGenerationError) as error:
        raise RecipeError(f"data: {file} cannot be read: {error}") from None


def _saved(folder: Path) -> Iterator[Record]:
    found = _datasets().load_from_disk(str(folder))
    if isinstance(found, dict):  # of splits
        found = found.get("train") or next(iter(found.values()))
    yield from found
