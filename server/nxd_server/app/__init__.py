"""Serve one artifact: what it is, its ranks and engine, and the life of the process."""
