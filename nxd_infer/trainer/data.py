"""Batches of a dataset that resume exactly where a job stopped, at the same or another data-parallel degree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.util.options import whole_number

__all__ = ["ResumableLoader"]


class ResumableLoader:
    """This rank's batches of ``dataset``: ``for batch in loader`` is one epoch, or the rest of an interrupted one.

    Args:
        dataset: with ``len()`` and ``[index]``; the same on every rank.
        batch_size: samples per data-parallel rank. A step over all ranks takes ``batch_size * dp`` consecutive samples
            of the epoch's order, and each rank its part of them; a last incomplete step is dropped.
        shuffle: a new order every epoch, which depends only on ``seed`` and the epoch's number.
        options: passed to ``torch.utils.data.DataLoader`` (``num_workers``, ``collate_fn``, ...).

    The position counts the yielded samples of all ranks, not those that workers have prefetched, so
    ``save_checkpoint(..., dataloader=loader)`` between two steps and ``load_checkpoint(..., dataloader=loader)`` resume
    with the very next batch. The position is the same on every rank. At another data-parallel degree the steps have the
    same samples, if ``batch_size`` is changed to keep the size of a step. Drawing batches does not touch the global
    random generators.

    Raises ParallelConfigError if the dataset does not fill one step.
    """

    def __init__(self, dataset: Dataset, batch_size: int = 1, *, shuffle: bool = False, seed: int = 0, **options: Any):
        whole_number("batch_size", batch_size, ParallelConfigError, minimum=1)
        taken = {"batch_sampler", "sampler", "drop_last", "generator"} & options.keys()
        if taken:
            raise ParallelConfigError(f"{sorted(taken)} cannot be passed: this loader decides the order itself")
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self._options = options
        self.epoch = 0
        """Number of finished epochs."""
        self._samples = 0
        """Samples of all ranks that were yielded in this epoch."""
        self._newest: object = None
        """Of the iterator that moves the position; one from before another began, or from before a load, ends."""
        if len(self) < 1:
            raise ParallelConfigError(
                f"a dataset of {self._length} samples does not fill a step of {self._step}: batch_size {batch_size} on "
                f"{current_context().dp.degree} data-parallel ranks"
            )

    @property
    def _length(self) -> int:
        return len(self.dataset)  # pyright: ignore[reportArgumentType]

    @property
    def _step(self) -> int:
        """Samples in a step, over all ranks."""
        return self.batch_size * current_context().dp.degree

    def __len__(self) -> int:
        """Batches per epoch."""
        return self._length // self._step

    def __iter__(self) -> Iterator[Any]:
        loader = DataLoader(
            self.dataset,
            batch_sampler=self._batches(),  # pyright: ignore[reportArgumentType]
            generator=torch.Generator().manual_seed(self.seed + self.epoch),
            **self._options,
        )
        step = self._step
        mine = self._newest = object()
        for batch in loader:
            if self._newest is not mine:
                return
            self._samples += step
            yield batch
        if self._newest is not mine:
            return
        self.epoch, self._samples = self.epoch + 1, 0

    def _batches(self) -> list[list[int]]:
        """Return the indices of this rank's batches from the position to the end of the epoch."""
        if self.shuffle:
            order = torch.randperm(self._length, generator=epoch_generator(self.seed, self.epoch))
        else:
            order = torch.arange(self._length)
        step, place = self._step, current_context().dp.rank * self.batch_size
        starts = range(self._samples, self._length - step + 1, step)
        return [order[start + place : start + place + self.batch_size].tolist() for start in starts]

    def state_dict(self) -> dict[str, int]:
        """Return the position: plain numbers, the same on every rank."""
        order = {"length": self._length, "seed": self.seed, "shuffle": self.shuffle}
        return {"epoch": self.epoch, "samples": self._samples, **order}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position; takes effect at the next iteration.

        Raises CheckpointError for the position of another dataset or another order.
        """
        mine = self.state_dict()
        whole = isinstance(state, dict) and all(isinstance(state.get(key), int) for key in ("epoch", "samples"))
        if not whole or min(state["epoch"], state["samples"]) < 0:
            raise CheckpointError(f"{state!r:.120} is not a position of a ResumableLoader; load another tag")
        for key in ("length", "seed", "shuffle"):
            if state.get(key) != mine[key]:
                raise CheckpointError(
                    f"the position in the data is from a loader with {key} {state.get(key)!r}, but this one has "
                    f"{mine[key]!r}: the order would differ"
                )
        self.epoch, self._samples = state["epoch"], state["samples"]
        self._newest = None


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a generator for one epoch; neighbouring seeds do not share an epoch's order."""
    draws = torch.randint(1 << 62, (epoch + 1,), generator=torch.Generator().manual_seed(seed))
    return torch.Generator().manual_seed(int(draws[epoch]))
