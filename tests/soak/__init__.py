"""A soak: the real server under random traffic, swaps and faults, watched all the time."""
