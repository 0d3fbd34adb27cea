"""Checkpoints of training jobs: saving, loading at any degree, and weights out of them."""
