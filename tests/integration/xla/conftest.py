"""Torch does not bring torch_xla along: a process that needs it says so, and the others start in half the time."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
