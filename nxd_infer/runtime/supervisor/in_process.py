"""Degree 1 in the caller's process: the same exchanges as with rank processes, in ordinary memory."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import TensorSpec
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.context import LOCAL
from nxd_infer.errors import ModelClosedError, RankFailedError
from nxd_infer.runtime.ipc import Kind
from nxd_infer.runtime.rank_process.rank import Rank, Runtime
from nxd_infer.runtime.ranks import RankHealth, Ranks


@dataclass
class LocalSide:
    """The tensors of one side of an arena: inputs and outputs of every bucket."""

    inputs: list[list[Tensor]]
    outputs: list[list[Tensor]]
    taken: bool = False
    last: None = None


class LocalRank(Ranks):
    """Run an artifact of degree 1 in this process.

    A call that raises or is interrupted leaves states undefined, so it closes a rank with states.
    """

    def __init__(self, artifact: LoadedArtifact, *, threads: int):
        self.artifact = artifact
        self.threads = threads
        self._sides: list[LocalSide] = []
        self._rank: Rank | None = None
        self._inside = self._closing = False
        self._steps = 0
        self._clock: float | None = None

    @property
    def sides(self) -> list[LocalSide]:
        return self._sides

    def start(self) -> None:
        self.artifact.verify_again(0)
        self._rank = Rank(self.artifact, 0, Runtime(LOCAL, self.threads, self.artifact))
        buckets = self.artifact.manifest.buckets
        inputs = [[_zeros(spec) for spec in bucket.inputs] for bucket in buckets]
        self._sides = [LocalSide(inputs, [[_zeros(spec) for spec in bucket.outputs] for bucket in buckets])]

    def begin(
        self,
        kind: Kind,
        bucket: int = 0,
        side: int = 0,
        *,
        fds: Sequence[int] = (),
        timeout: float | None = None,
        fatal: bool = True,
    ) -> None:
        """Do it now: nothing can run in the background, and ``timeout`` has no effect."""
        self.check()
        assert self._rank is not None
        self._clock = time.monotonic()
        self._inside = True
        try:
            if kind == Kind.STEP:
                inputs = self.sides[0].inputs[bucket]
                self.sides[0].outputs[bucket] = self._rank.bind(bucket, inputs)()
            else:
                self._rank.serve(kind, fds)
        except BaseException as error:
            failure = error
            if isinstance(error, Exception):
                failure = RankFailedError(f"rank 0 of 1 raised: {error}", 0, traceback.format_exc())
            if fatal and self.artifact.manifest.states:
                self.failure = failure
            if failure is error:
                raise
            raise failure from error
        finally:
            self._inside = False
            if self._closing:
                self.close()
        self._steps += 1

    def finish(self, exchange: None) -> None:
        """Do nothing: ``begin`` has finished it."""

    def settle(self) -> None:
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            reason = str(self.failure) or f"a call was ended by {type(self.failure).__name__}"
            raise ModelClosedError(f"the model was closed because {reason}; call restart()") from self.failure
        if self._rank is None:
            raise ModelClosedError("the model was closed; call restart() to load its graphs again")

    def health(self) -> list[RankHealth]:
        alive = self._rank is not None and self.failure is None
        age = time.monotonic() - self._clock if self._clock is not None else None
        return [RankHealth(0, os.getpid(), alive, "running" if alive else "ended", self._steps, 0, 0.0, age)]

    def close(self) -> None:
        """Free the graphs; if called by a signal handler during a call, at that call's end."""
        if self._inside:
            self._closing = True
            return
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        self._sides = []


def _zeros(spec: TensorSpec) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.torch_dtype)
