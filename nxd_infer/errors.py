"""Every exception a user can see. Each names the value, the limit and the fix.

All of them derive from :class:`NxdError`, so one ``except`` catches them and the command line can print
them without a traceback. Where Python has a matching built-in (``ValueError``, ``TimeoutError``, ...) the
class derives from that as well, because ported code catches those.
"""

from __future__ import annotations


class NxdError(Exception):
    """Base of every error that is the user's to fix or to handle."""


# --- configuration and layers -------------------------------------------------------------------------


class ParallelConfigError(NxdError, ValueError):
    """A parallel degree, rank or group that cannot exist."""


class NotInitializedError(NxdError, RuntimeError):
    """A group was asked for before ``initialize_model_parallel``."""


class ShardingError(NxdError, ValueError):
    """A size that does not divide over the ranks, or a layout that does not fit its tensor."""


class CheckpointError(NxdError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another model or degree."""


class OpenFilesError(CheckpointError):
    """The process may open no further file now; nothing is wrong with the checkpoint."""


class WeightMismatchError(CheckpointError):
    """Weights that do not belong to a model; ``missing``, ``unexpected`` and ``mismatched`` list what differs."""

    def __init__(
        self,
        message: str,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (),
    ):
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.mismatched = mismatched
        """``(name, shape found, shape wanted)``."""


class NonFiniteGradientError(NxdError, ArithmeticError):
    """Gradients that are NaN or infinite; ``names`` lists their parameters. Nothing has been stepped."""

    def __init__(self, message: str, names: tuple[str, ...] = ()):
        super().__init__(message)
        self.names = names


class ModelConfigError(NxdError, ValueError):
    """A model directory or configuration this package cannot run; names the field."""


# --- collectives and ranks ----------------------------------------------------------------------------


class CollectiveError(NxdError, RuntimeError):
    """A collective could not run (wrong shape, wrong dtype, no transport)."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A peer did not reach a collective in time; ``ranks`` lists who is missing."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks


class RankError(NxdError, RuntimeError):
    """A rank process failed; ``rank`` says which one."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank

    @property
    def summary(self) -> str:
        """The message without what the rank printed: for a client, where the whole of it goes to a log."""
        return str(self).partition("\n--- ")[0]

    @property
    def foreseen(self) -> bool:
        """Whether the summary says all there is to say."""
        return False


class RankStartError(RankError):
    """The system does not give what ranks need to start: a process, descriptors, memory that they share."""


class RankDiedError(RankError):
    """A rank process ended while it was needed."""

    @property
    def foreseen(self) -> bool:
        """Whether a file that the rank had mapped was cut short: no stack says more of that."""
        return "was ended by SIGBUS" in self.summary


class RankTimeoutError(RankError, TimeoutError):
    """A rank process did not answer within ``call_timeout``."""


class RankFailedError(RankError):
    """A rank raised; ``remote_traceback`` holds what it printed."""

    def __init__(self, message: str, rank: int | None = None, remote_traceback: str = ""):
        super().__init__(message, rank)
        self.remote_traceback = remote_traceback

    @property
    def foreseen(self) -> bool:
        """Whether the rank raised an error of this package, whose message says all there is to say."""
        return any(line.startswith(f"{__name__}.") for line in self.remote_traceback.splitlines())


class ModelClosedError(NxdError, RuntimeError):
    """A call on a model whose ranks have been stopped."""


class StepsPendingError(NxdError, RuntimeError):
    """As many steps were begun as can be, and their results not taken; or a result was asked for that is gone."""


# --- tracing, artifacts, calls ------------------------------------------------------------------------


class TraceError(NxdError, RuntimeError):
    """Tracing or compiling failed. ``rank`` and ``remote_traceback`` say where, when a rank process did."""

    def __init__(self, message: str, rank: int | None = None, remote_traceback: str = ""):
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class TraceConfigError(TraceError, ValueError):
    """Arguments of ``parallel_model_trace`` that contradict each other or are out of range."""


class BackendUnavailableError(NxdError, RuntimeError):
    """A backend cannot run here; the message holds the reason its probe gave."""


class UntrustedCacheError(NxdError, RuntimeError):
    """Another user could change what is in the cache, which is code: the message names the directory and the fix."""


class MissingPackageError(NxdError, ImportError):
    """An optional package is absent; the message says which extra brings it, ``name`` is the package."""


class InputMismatchError(NxdError, ValueError):
    """An input's dtype, shape, count or value is not what the graph was traced for."""


class InputRangeError(InputMismatchError):
    """A value of the input ``input`` is outside the range that the model declares for it."""

    def __init__(self, message: str, input: str = ""):
        super().__init__(message)
        self.input = input


class BucketError(InputMismatchError):
    """No bucket fits; the message holds the bucket table, ``buckets`` the shapes."""

    def __init__(self, message: str, buckets: list | None = None):
        super().__init__(message)
        self.buckets = buckets or []


class ArtifactError(NxdError, RuntimeError):
    """An artifact cannot be read or written."""


class ArtifactSpaceError(ArtifactError):
    """The disk (or a quota) filled up while an artifact was written; nothing of it is left."""


class ArtifactCorruptError(ArtifactError):
    """A file is missing, truncated, or differs from its checksum."""


class ArtifactVersionError(ArtifactError):
    """The artifact's format, torch version or CPU features are not those of this machine."""


class ArtifactBackendError(ArtifactError):
    """The artifact belongs to a backend other than the one asked for, or one that is absent."""


class WeightSchemaError(ArtifactError, ValueError):
    """Weights that do not match the schema the graphs were traced with; lists what differs."""


class AdapterError(NxdError, ValueError):
    """A LoRA adapter that a model's slots cannot take; nothing has changed."""
