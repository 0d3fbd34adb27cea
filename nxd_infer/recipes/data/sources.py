"""Records of the files that a recipe names: what ``datasets`` reads, and texts, of which each is a record."""

from __future__ import annotations

import glob
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec

from nxd_infer.errors import MissingPackageError, RecipeError
from nxd_infer.recipes.yaml_text import required

TEXTS = (".txt", ".md", ".rst", ".py")
KINDS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    **dict.fromkeys(TEXTS, "text"),
}
"""The reader of ``datasets`` for each kind of file."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
PACKAGES = {".zst": "zstandard", ".lz4": "lz4"}
"""What reads those that Python does not."""
ABOUT = ("readme", "license", "licence", "notice", "changelog")
"""Texts of these names in a folder are about its data."""
SAVED = ("state.json", "dataset_dict.json")
"""A file of these names makes a folder a dataset that Hugging Face's ``save_to_disk`` wrote."""

Record = Mapping[str, Any]


def kind_of(file: Path) -> str | None:
    """Return the reader of a file by its name; None if there is none."""
    inner = file.with_suffix("") if file.suffix in COMPRESSED else file
    return KINDS.get(inner.suffix)


def files_of(path: Path) -> list[Path]:
    """Return the files that :func:`records` reads, sorted; a saved dataset stands for itself.

    Raises RecipeError if there are none.
    """
    if path.is_file() or is_saved(path):
        return [path]
    there = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else []
    files = [one for one in there if kind_of(one) and not any(p.startswith(".") for p in one.relative_to(path).parts)]
    texts = [one for one in files if kind_of(one) == "text"]
    if len(texts) < len(files):
        files = [one for one in files if one not in texts or not one.stem.lower().startswith(ABOUT)]
    if not files:
        problem = f"has no file of {', '.join(KINDS)}" if path.is_dir() else "is not there"
        raise RecipeError(f"data: {path} {problem}: give a file, a folder of files, or a dataset saved to disk")
    return files


def is_saved(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in SAVED)


def records(path: Path, split: str | None = None, subset: str | None = None, usual: str = "train") -> Iterator[Record]:
    """Yield the records of a file, of a folder's split, or of a saved dataset's.

    ``split``: its name; None: ``usual`` where it is there, or else the only one. ``subset``: of a folder whose README
    has several configurations. Raises RecipeError that names what cannot be read.
    """
    try:
        yield from _read(path, split, subset, usual)
    except (RecipeError, MissingPackageError):
        raise
    except Exception as error:  # whatever the reader of this kind raises
        why = " ".join(str(error).split()) or repr(error)
        if (package := PACKAGES.get(path.suffix)) and importlib.util.find_spec(package) is None:
            why += f": pip install {package}"
        raise RecipeError(f"data: {path} cannot be read: {why}") from error


def _read(path: Path, split: str | None, subset: str | None, usual: str) -> Iterator[Record]:
    files = files_of(path)
    datasets = required("datasets", "a recipe's data are read by the package datasets")
    if is_saved(path):
        loaded = datasets.load_from_disk(str(path))
        splits = loaded if isinstance(loaded, dict) else {"train": loaded}
        yield from _of_tables(splits[_chosen(path, list(splits), split, usual)])
        return
    kinds = {kind_of(one) for one in files}
    if None in kinds:
        raise RecipeError(f"data: {path} is of no kind that is read: {', '.join(KINDS)}, or a dataset saved to disk")
    for file in files:
        if kind_of(file) == "json":
            _require_no_null(file)
    with tempfile.TemporaryDirectory() as cache:  # files are read as a stream: nothing but locks comes there
        if path.is_dir() and kinds != {"text"}:
            builder = datasets.load_dataset_builder(str(path), subset, cache_dir=cache)
            _require_all_read(path, files, builder)
        else:
            more: dict[str, Any] = {}
            if kinds == {"text"}:
                more["sample_by"] = "document"
            elif kinds == {"csv"}:
                more = {"keep_default_na": False, "sep": "\t" if ".tsv" in path.suffixes else ","}  # "NA" is a text
            plain = path.is_dir() and all(one.suffix == ".txt" for one in files)
            names = _by_split(path, files, datasets) if plain else [glob.escape(str(one)) for one in files]
            builder = datasets.load_dataset_builder(kinds.pop(), data_files=names, cache_dir=cache, **more)
        chosen = _chosen(path, [str(one) for one in builder.config.data_files], split, usual)
        if any(one.stat().st_size for one in files):  # `datasets` cannot say what an empty file holds
            stream = builder.as_streaming_dataset(chosen)
            yield from _of_json(stream, datasets) if "json" in map(kind_of, files) else _of_tables(stream)


def _by_split(path: Path, files: list[Path], datasets: Any) -> dict[str, list[str]]:
    """Return the files of a folder by the splits that their names say, as `datasets` does for other kinds."""
    patterns = datasets.data_files.get_data_patterns(str(path))
    found = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=str(path))
    known = {str(one.resolve()): str(one) for one in files}
    splits = {str(split): [known[one] for one in some if one in known] for split, some in found.items()}
    if left := [name for name in known.values() if not any(name in some for some in splits.values())]:
        raise RecipeError(
            f"data: {path}: the names of some files say that they are a split, and that of {left[0]} does not: give "
            "the files that belong together a folder of their own"
        )
    return {split: list(map(glob.escape, some)) for split, some in splits.items() if some}


def _of_json(stream: Any, datasets: Any) -> Iterator[Record]:
    """Yield records whose objects have the keys that they have in the file."""
    if stream.features is None and (table := next(iter(stream.with_format("arrow")), None)) is not None:
        # A list, whose types are not known before it is read; what differs from record to record is still text.
        return map(datasets.Features.from_arrow_schema(table.schema).decode_example, stream)
    return iter(stream)


def _of_tables(found: Any) -> Iterator[Record]:
    return (_without_absent(record, found.features) for record in found)


def _without_absent(value: Any, feature: Any) -> Any:
    """Leave out the keys that are null: a table has every key in every object, also those of other records' tools."""
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {name: _without_absent(one, feature.get(name)) for name, one in value.items() if one is not None}
    inner = getattr(feature, "feature", None)
    if isinstance(value, list) and (isinstance(inner, Mapping) or hasattr(inner, "feature")):
        return [_without_absent(one, inner) for one in value]
    return value


def _require_no_null(file: Path) -> None:
    """Raise RecipeError for JSON that begins with null, at which pyarrow's reader ends the process."""
    with fsspec.open(str(file), "rb", compression="infer") as opened:
        head = opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n[")  # pyright: ignore[reportAttributeAccessIssue]
    if head.startswith(b"null"):
        raise RecipeError(f"data: {file} begins with null, which is no record")


def _require_all_read(path: Path, files: list[Path], builder: Any) -> None:
    """Raise RecipeError for a file that ``datasets`` leaves out of a folder, unless the README there chooses."""
    readme = path / "README.md"
    if readme.is_file() and "configs:" in readme.read_text(errors="replace"):
        return
    read = {Path(one).resolve() for some in builder.config.data_files.values() for one in some}
    left = [str(one.relative_to(path)) for one in files if one.resolve() not in read]
    if left:
        raise RecipeError(
            f"data: {path}: {left[0]} would not be read, because most other files there are of another kind: give the "
            "files that belong together a folder of their own"
        )


def _chosen(path: Path, splits: list[str], split: str | None, usual: str) -> str:
    if split is None and (usual in splits or len(splits) == 1):
        return usual if usual in splits else splits[0]
    if split not in splits:
        asked = f"no split {split!r}" if split else f"several splits, but not {usual}"
        key = "train_split" if usual == "train" else "val_split"
        raise RecipeError(f"data: {path} has {asked}; there are {', '.join(splits)}: choose one by data.{key}")
    return split
