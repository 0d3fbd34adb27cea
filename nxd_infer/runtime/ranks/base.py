"""The interface of a model's ranks, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nxd_infer.runtime.ranks.channel import Kind
from nxd_infer.runtime.ranks.health import RankHealth


class Ranks(Protocol):
    """Runs the graphs: in processes (:class:`Supervisor`) or, at degree 1, in this one (:class:`LocalRank`)."""

    @property
    def sides(self) -> Sequence[Any]:
        """Places for a step's inputs and outputs."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the ranks, if any."""
        ...

    def start(self) -> None: ...
    def exchange(
        self,
        kind: Kind,
        bucket: int = 0,
        *,
        timeout: float | None = None,
        fds: list[int] | None = None,
        fatal: bool = True,
    ) -> None: ...
    def begin(self, kind: Kind, bucket: int = 0, side: int = 0, *, timeout: float | None = None) -> Any: ...
    def finish(self, exchange: Any, timeout: float | None = None) -> None: ...
    def settle(self) -> None: ...
    def check(self) -> None: ...
    def health(self) -> list[RankHealth]: ...
    def close(self) -> None: ...
