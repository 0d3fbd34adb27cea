"""Serve one artifact: its description, its ranks and engine, and the lifecycle of the process."""
