"""The base class of the server's errors, and those of its settings."""

from __future__ import annotations

from nxd_infer.errors import ModelConfigError, NxdError


class ServerError(NxdError):
    """Base class of the errors that the engine and the HTTP layer raise themselves."""


class SettingsError(NxdError, ValueError):
    """A setting has an invalid value; names the setting, never the value of a secret."""


class GenerateOnlyError(ServerError, ModelConfigError):
    """A setting that applies only to artifacts that generate text."""

    def __init__(self, name: str, task: str):
        super().__init__(f"{name}: the artifact's task is {task!r}, and only 'generate' has it")
