"""Tracing each rank: in a process of its own, or all in this one from a checkpoint."""
