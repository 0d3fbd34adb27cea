"""Rows of equal length made of documents: windows of one long text, a document per row, or several packed into one.

Every row is a mapping of int64 tensors [S]: ``input_ids``; ``labels``, -100 where nothing is to be predicted; and where
rows have padding or documents that must not see each other, ``attention_mask``, 0 for padding and else the document's
number in the row from 1, and ``position_ids``, which restart at each document.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nxd_infer.errors import RecipeError
from nxd_infer.parallel_layers.loss_functions import IGNORED

Row = dict[str, Tensor]


class Documents:
    """Tokens of documents, one after the other: what the files that hold them have in common."""

    ids: np.ndarray
    """Integers [tokens]."""
    counts: np.ndarray | None
    """Whether each token's prediction counts in the loss; None: all do."""
    bounds: np.ndarray
    """int64: document i is ``ids[bounds[i]:bounds[i + 1]]``."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)


def mapped(path: Path, kind: Any, count: int) -> np.ndarray:
    """Return a file's first numbers, mapped into memory, which cannot be done with an empty file."""
    return np.memmap(path, kind, "r", shape=(count,)) if count else np.zeros(0, kind)


def check_vocabulary(least: int, most: int, size: int, what: str) -> None:
    """Raise RecipeError unless ids from ``least`` to ``most`` are tokens of a vocabulary of ``size``."""
    if not 0 <= least <= most < size:
        wrong = most if most >= size else least
        raise RecipeError(
            f"data: {what}: there is no token {wrong} in a vocabulary of {size}: take the tokenizer and the model "
            "that the data was made for"
        )


class Windows(Dataset):
    """Consecutive windows of the documents ``first`` to ``last`` as one text.

    ``apart``: documents do not see each other; ``restart``: positions restart at each; ``end``: the id that ends a
    document, if it shall not count. ``vocabulary``: its tokens are from 0 to below it, or reading a row raises
    RecipeError; None: they have been checked.
    """

    def __init__(
        self,
        documents: Documents,
        length: int,
        first: int = 0,
        last: int | None = None,
        *,
        apart: bool = False,
        restart: bool = False,
        end: int | None = None,
        vocabulary: int | None = None,
    ):
        last = len(documents) if last is None else last
        self.documents, self.length, self.apart, self.restart, self.end = documents, length, apart, restart, end
        self.vocabulary = vocabulary
        self.start, self.stop = int(documents.bounds[first]), int(documents.bounds[last])

    def __len__(self) -> int:
        return (self.stop - self.start) // self.length

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < len(self):
            raise IndexError(number)
        low = self.start + number * self.length
        high = low + self.length
        ids = np.array(self.documents.ids[low:high], np.int64)
        if self.vocabulary is not None:
            check_vocabulary(int(ids.min()), int(ids.max()), self.vocabulary, f"tokens {low} to {high - 1}")
        labels = ids.copy()
        if self.documents.counts is not None:
            labels[~self.documents.counts[low:high]] = IGNORED
        if self.end is not None:
            labels[ids == self.end] = IGNORED
        row = {"input_ids": ids, "labels": labels}
        if self.apart or self.restart:
            bounds = self.documents.bounds
            inside = bounds[np.searchsorted(bounds, low, "right") : np.searchsorted(bounds, high, "left")] - low
            starts = np.concatenate([[0], inside]).astype(np.int64)
            owner = np.searchsorted(starts, np.arange(self.length), "right") - 1
            if self.apart:
                labels[starts] = IGNORED  # the document before must not predict it
                row["attention_mask"] = owner + 1
            if self.restart:
                row["position_ids"] = np.arange(self.length) - starts[owner]
        return {name: torch.from_numpy(value) for name, value in row.items()}


class Packed(Dataset):
    """Rows of whole documents, as :func:`pack` or ``one_each`` puts them together; longer documents are cut."""

    def __init__(self, documents: Documents, length: int, bins: Sequence[Sequence[int]], pad: int = 0):
        self.documents, self.length, self.bins, self.pad = documents, length, bins, pad

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, number: int) -> Row:
        ids = np.full(self.length, self.pad, np.int64)
        labels = np.full(self.length, IGNORED, np.int64)
        owner, positions = np.zeros(self.length, np.int64), np.zeros(self.length, np.int64)
        at, documents = 0, self.documents
        for place, one in enumerate(self.bins[number], 1):
            low = int(documents.bounds[one])
            size = min(int(documents.bounds[one + 1]) - low, self.length - at)
            here = slice(at, at + size)
            ids[here] = documents.ids[low : low + size]
            counts = slice(None) if documents.counts is None else documents.counts[low : low + size]
            labels[here][counts] = ids[here][counts]
            labels[at] = IGNORED  # the document before must not predict it
            owner[here], positions[here] = place, np.arange(size)
            at += size
        row = {"input_ids": ids, "labels": labels, "attention_mask": owner, "position_ids": positions}
        return {name: torch.from_numpy(value) for name, value in row.items()}


def one_each(documents: Documents) -> list[list[int]]:
    """Return a row for each document."""
    return [[number] for number in range(len(documents))]


def pack(lengths: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """Put documents into rows of ``room`` tokens: the longest first, each into the fullest row that it fits.

    Best fit decreasing: rows waste few percent. The order is that of the rows' first documents in the data.
    """
    sizes = np.minimum(np.asarray(lengths), room)
    by_room: dict[int, list[int]] = {}
    free = np.zeros(room + 1, np.int64)
    """How many rows have this much room."""
    bins: list[list[int]] = []
    for number in np.argsort(-sizes, kind="stable"):
        size = int(sizes[number])
        fitting = np.flatnonzero(free[size:])
        if len(fitting):
            left = size + int(fitting[0])
            place = by_room[left].pop()
            free[left] -= 1
        else:
            left, place = room, len(bins)
            bins.append([])
        bins[place].append(int(number))
        by_room.setdefault(left - size, []).append(place)
        free[left - size] += 1
    for one in bins:
        one.sort()
    return sorted(bins)


class Pairs(Dataset):
    """Two documents per row, the chosen and the rejected answer: tensors [2, S], with ``targets`` in place of labels.

    ``reference`` is added where it is known: the log-probability of both answers, [2] (DPO).
    """

    def __init__(self, documents: Documents, length: int, pad: int = 0, reference: Tensor | None = None):
        self.rows = Packed(documents, length, one_each(documents), pad)
        self.reference = reference

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, number: int) -> Row:
        both = [self.rows[2 * number], self.rows[2 * number + 1]]
        row = {name: torch.stack([one[name] for one in both]) for name in both[0] if name != "position_ids"}
        row["targets"] = row.pop("labels")
        if self.reference is not None:
            row["reference"] = self.reference[number]
        return row


class Blend(Dataset):
    """Rows of several datasets in turn, in proportion to their weights, until one has no more."""

    def __init__(self, parts: Sequence[Dataset], weights: Sequence[float]):
        shares = np.asarray(weights, np.float64) / sum(weights)
        rows = [np.arange(len(part)) for part in parts]  # pyright: ignore[reportArgumentType]
        due = np.concatenate([(numbers + 0.5) / share for numbers, share in zip(rows, shares, strict=True)])
        total = int(min(len(numbers) / share for numbers, share in zip(rows, shares, strict=True)))
        order = np.argsort(due, kind="stable")[:total]
        self.parts = parts
        self.part = np.repeat(np.arange(len(parts)), [len(numbers) for numbers in rows])[order]
        self.row = np.concatenate(rows)[order]

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, number: int) -> Row:
        return self.parts[self.part[number]][int(self.row[number])]
