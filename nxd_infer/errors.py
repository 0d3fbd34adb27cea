"""Every exception that users can see. Each message names the value, the limit and the fix.

All derive from :class:`NxdError`, so one ``except`` catches them and the command line can print them without a
traceback. If Python has a matching built-in (``ValueError``, ``TimeoutError``, ...), the class derives from that as
well, because ported code catches those.
"""

from __future__ import annotations

import errno


class NxdError(Exception):
    """Base class of every error that the user can fix or handle."""


# --- configuration and layers -------------------------------------------------------------------------


class ParallelConfigError(NxdError, ValueError):
    """A parallel degree, rank or group that cannot exist."""


class LoraTargetError(ParallelConfigError):
    """What LoRA is to adapt does not fit the model: ``target_modules`` match no layer, or one that cannot be merged, or
    the model's type has no default."""


class NotInitializedError(NxdError, RuntimeError):
    """A group was requested before ``initialize_model_parallel``."""


class ShardingError(NxdError, ValueError):
    """A size that does not divide over the ranks, or a layout that does not fit its tensor."""


class CheckpointError(NxdError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another model or degree."""


class CheckpointTagError(CheckpointError):
    """The folder is there, and has no complete checkpoint of the tag that was asked for."""


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
        """``(name, actual shape, expected shape)``."""


class NonFiniteGradientError(NxdError, ArithmeticError):
    """Gradients are NaN or infinite; ``names`` lists their parameters. No parameter was updated."""

    def __init__(self, message: str, names: tuple[str, ...] = ()):
        super().__init__(message)
        self.names = names


class ModelConfigError(NxdError, ValueError):
    """A model directory or configuration that this package cannot run; names the field."""


class RecipeError(NxdError, ValueError):
    """A training recipe (YAML) that cannot be run; names the file, the line and the key."""


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
        """The message without the rank's output: for clients, while the full message goes to a log."""
        return str(self).partition("\n--- ")[0]

    @property
    def foreseen(self) -> bool:
        """Whether the summary says it all, so that no stack trace is needed."""
        return False


class RankStartError(RankError):
    """The system lacks what ranks need to start: a process, descriptors, shared memory. The cause is its error."""

    @property
    def passing(self) -> bool:
        """Whether the system lacks processes, memory or descriptors, of which it may have enough in a moment."""
        return getattr(self.__cause__, "errno", None) in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class RankDiedError(RankError):
    """A rank process ended while it was needed."""

    @property
    def foreseen(self) -> bool:
        """Whether a file that the rank had mapped was truncated: a stack trace adds nothing to that."""
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
        """Whether the rank raised an error of this package, whose message says it all."""
        return any(line.startswith(f"{__name__}.") for line in self.remote_traceback.splitlines())


class ModelClosedError(NxdError, RuntimeError):
    """A model was called after its ranks were stopped."""


class StepsPendingError(NxdError, RuntimeError):
    """The maximum number of steps is in flight and their results were not taken; or a result no longer exists."""


# --- tracing, artifacts, calls ------------------------------------------------------------------------


class TraceError(NxdError, RuntimeError):
    """Tracing or compiling failed. If it failed in a rank process, ``rank`` and ``remote_traceback`` say where."""

    def __init__(self, message: str, rank: int | None = None, remote_traceback: str = ""):
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class TraceConfigError(TraceError, ValueError):
    """Arguments of ``parallel_model_trace`` that contradict each other or are out of range."""


class BackendUnavailableError(NxdError, RuntimeError):
    """A backend cannot run here; the message gives the reason from its probe."""


class DeviceOnlyError(NxdError, NotImplementedError):
    """A name of the old packages that has no place here was used; the message says what to call instead."""


class UntrustedCacheError(NxdError, RuntimeError):
    """Another user could change the cache, which holds code; the message names the directory and the fix."""


class CacheUnavailableError(NxdError, OSError):
    """The cache's directory cannot be made or read; the message names it and the variable for another one."""


class MissingPackageError(NxdError, ImportError):
    """An optional package is not installed; the message names the extra to install, ``name`` is the package."""


class InputMismatchError(NxdError, ValueError):
    """The dtype, shape, number or value of inputs differs from what the graph was traced for."""


class InputRangeError(InputMismatchError):
    """A value of the input ``input`` is outside the range that the model declares."""

    def __init__(self, message: str, input: str = ""):
        super().__init__(message)
        self.input = input


class BucketError(InputMismatchError):
    """No bucket fits; the message shows the bucket table, ``buckets`` has the shapes."""

    def __init__(self, message: str, buckets: list | None = None):
        super().__init__(message)
        self.buckets = buckets or []


class ArtifactError(NxdError, RuntimeError):
    """An artifact cannot be read or written."""


class ArtifactSpaceError(ArtifactError):
    """The disk (or a quota) filled up while an artifact was written; the partial artifact was removed."""


class ArtifactCorruptError(ArtifactError):
    """A file is missing, truncated, or differs from its checksum."""


class ArtifactVersionError(ArtifactError):
    """The artifact's format, torch version or CPU features do not match this machine."""


class ArtifactBackendError(ArtifactError):
    """The artifact belongs to another backend than requested, or to one that is not available."""


class WeightSchemaError(ArtifactError, ValueError):
    """Weights do not match the schema that the graphs were traced with; lists the differences."""


class MemoryBudgetError(NxdError, RuntimeError):
    """What is to be loaded does not fit into the memory that it may use; the message shows the sum."""


class AdapterError(NxdError, ValueError):
    """A LoRA adapter does not fit the model's slots; nothing has changed."""
