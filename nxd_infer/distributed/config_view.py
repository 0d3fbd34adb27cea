"""A configuration as one rank's modules see it."""

from __future__ import annotations

from typing import Any


class ConfigView:
    """Another configuration with a few values of its own.

    The model's configuration stays that of the whole model: it is saved, and says how weights are stored.
    """

    def __init__(self, config: Any, **own: Any):
        self.__dict__.update(own, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # while a copy is made, before it has its attributes
            raise AttributeError(name)
        return getattr(self._config, name)
