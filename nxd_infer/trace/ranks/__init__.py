"""Tracing each rank: in its own process, or all in this one from a checkpoint."""
