"""Tests of models use tiny tensors, many of them."""

from tests.support.one_thread import one_thread

__all__ = ["one_thread"]
