"""Compiling graphs: a pool of processes, and a cache of what they made."""
