"""A DataLoader's batches for this data-parallel rank: its own share, in the loader's order, from any position on.

Lightning's own sampler shuffles all training data, also that of a loader which does not, and a resumed epoch begins
anew. So the strategy takes this in its place. The order depends on the seed and the epoch alone: it is the same on all
ranks, so tensor- and pipeline-parallel peers get the same batches, and after resuming.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from nxd_infer.context import Axis
from nxd_infer.errors import ParallelConfigError
from nxd_infer.trainer.data import epoch_generator


def share_of(loader: Any, dp: Axis, splits: bool) -> Any:
    """Return what gives this rank's batches of ``loader``; the loader itself if only its owner can split it.

    ``splits``: False for a loader that gives each rank its own batches already, as one with a DistributedSampler does.
    Raises ParallelConfigError for a DistributedSampler that is not over the data-parallel ranks.
    """
    if not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        if splits and dp.degree > 1:
            rank_zero_warn(
                f"every data-parallel rank reads all of this {type(loader.dataset).__name__}: only the dataset itself "
                "can give each its part, by trainer.strategy.data_parallel_rank and data_parallel_size"
            )
        return loader
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            splits = False
            if (sampler.num_replicas, sampler.rank) != (dp.degree, dp.rank):
                raise ParallelConfigError(
                    f"a DistributedSampler of num_replicas={sampler.num_replicas}, rank={sampler.rank} on "
                    f"data-parallel rank {dp.rank} of {dp.degree}: ranks that share a model need the same data; leave "
                    "the sampler out, or give it trainer.strategy.data_parallel_size and data_parallel_rank"
                )
    return RankLoader(loader, dp.rank, dp.degree, splits)


class RankLoader:
    """Iterates over ``loader`` with its batches replaced by those of :class:`RankBatches`. Other attributes are its."""

    def __init__(self, loader: DataLoader, rank: int, degree: int, splits: bool):
        batched = loader.batch_sampler is not None
        source = loader.batch_sampler if batched else loader.sampler
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if loader.generator is None else loader.generator.initial_seed()
        self.batches = RankBatches(source, rank if splits else 0, degree if splits else 1, seed if splits else None)
        self._rank, self._seed = rank, seed
        self._loader = copy.copy(loader)  # of any class; DataLoader itself lets no attribute of these be set later
        vars(self._loader)["batch_sampler" if batched else "sampler"] = self.batches
        self._workers_seed = torch.Generator()  # in place of the global generator, which would be drawn from
        vars(self._loader)["generator"] = self._workers_seed
        if loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
            self._loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "worker_init_fn":  # Lightning would set one that differs between peers
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def sampler(self) -> RankBatches:
        """What Lightning tells the epoch."""
        return self.batches

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        # Nothing runs before the first batch is asked for: workers begin when the epoch and the position are known.
        seed = epoch_generator(self._seed, self.batches.epoch).initial_seed() + self._rank
        self._workers_seed.manual_seed(seed % (1 << 63))
        yield from self._loader

    def state_dict(self) -> dict[str, int]:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches.load_state_dict(state)


class RankBatches:
    """One rank's share of every step: ``degree`` ranks together take the items of ``source`` in its order.

    Items are samples if ``source`` is torch's own BatchSampler: a step takes ``batch_size * degree`` consecutive ones,
    and each rank its part of them. Else they are the items of ``source`` themselves, one for each rank in turn. A step
    that is not full takes the first items again, so that every rank has as many batches, of one size.

    Args:
        seed: samplers with a ``generator`` draw from one of this seed and the epoch; None leaves them as they are.
    """

    def __init__(self, source: Any, rank: int, degree: int, seed: int | None):
        self.source, self.rank, self.degree, self.seed = source, rank, degree, seed
        self._samples = type(source) is BatchSampler
        self._drops = bool(source.drop_last) if self._samples else False
        self.step = (source.batch_size if self._samples else 1) * degree
        """Items that a step takes, over all ranks."""
        self.epoch = 0
        self.items = 0
        """Items that the steps which have begun in this epoch took."""
        self._resumed: tuple[int, int] | None = None

    def __len__(self) -> int:
        items = len(self.source.sampler if self._samples else self.source)
        return items // self.step if self._drops else -(-items // self.step)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        self.items = resumed[1] if resumed is not None and resumed[0] == self.epoch else 0
        order = self._order()
        first = list(islice(order, self.degree))
        order = islice(chain(first, order), self.items, None)
        while taken := list(islice(order, self.step)):
            if self._drops and len(taken) < self.step:
                return
            taken += islice(cycle(first), -len(taken) % self.degree)
            part = len(taken) // self.degree
            mine = taken[self.rank * part : (self.rank + 1) * part]
            yield mine if self._samples else mine[0]

    def _order(self) -> Iterator[Any]:
        sampler = getattr(self.source, "sampler", self.source)
        if self.seed is not None and hasattr(sampler, "generator"):
            sampler.generator = epoch_generator(self.seed, self.epoch)
        return iter(sampler if self._samples else self.source)

    def begin_step(self) -> None:
        """Count a step; not those that workers have only prepared."""
        self.items += self.step

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch
        inner = getattr(getattr(self.source, "sampler", self.source), "set_epoch", None)
        if inner is not None:
            inner(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position: the same on every rank, and at any degree."""
        return {"epoch": self.epoch, "items": self.items}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position of the next iteration, if that is over the same epoch."""
        self._resumed = (state["epoch"], state["items"])
