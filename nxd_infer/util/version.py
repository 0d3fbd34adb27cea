"""The version of this package, readable by every layer. ``pyproject.toml`` repeats it."""

VERSION = "0.1.0"
