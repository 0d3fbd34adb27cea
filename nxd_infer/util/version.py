"""The version of this package, where every floor can read it. ``pyproject.toml`` says the same."""

VERSION = "0.1.0"
