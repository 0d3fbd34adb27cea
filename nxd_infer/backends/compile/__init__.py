"""Compiling graphs: a pool of processes, and a cache of their results."""
