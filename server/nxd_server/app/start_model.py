"""Create the model that a server runs, without torch if possible, and do other things while its ranks start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from nxd_infer.runtime.rank_model import RankModel, takes_arrays
from nxd_server.errors import EngineUnavailableError

if TYPE_CHECKING:
    from nxd_infer.artifact.reader import LoadedArtifact


class Aside:
    """``work``, in a daemon thread, so that the process can exit before it is done."""

    def __init__(self, what: str, work: Callable[[], None]):
        self._what = what
        self._done: Future[None] = Future()
        threading.Thread(target=self._run, args=[work], name="nxd-aside", daemon=True).start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._done.set_result(None)
        except BaseException as error:
            self._done.set_exception(error)

    def wait(self, seconds: float) -> None:
        """Wait until it is done. Raises what it raised, and EngineUnavailableError after ``seconds``."""
        wait([self._done], seconds)
        if not self._done.done():
            raise EngineUnavailableError(f"{self._what} has taken more than {seconds:.0f} s")
        self._done.result()


def make_model(artifact: LoadedArtifact, spawned: threading.Event, **options: Any) -> RankModel:
    """Return the model of ``artifact``, whose files are not hashed yet; sets ``spawned`` when a process imports torch.

    The engine for generation makes no tensors, so its server does not import torch, and hashes while the ranks do.
    """

    def before_load() -> None:
        spawned.set()
        artifact.verify()

    if artifact.manifest.metadata.get("task") == "generate" and takes_arrays(artifact.manifest):
        return RankModel(artifact, before_load=before_load, **options)
    before_load()
    from nxd_infer.runtime.model import TensorParallelModel  # slow: torch

    return TensorParallelModel(artifact, in_process=False, **options)
