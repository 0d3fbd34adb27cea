"""Benchmarks: ``python -m bench`` runs all of them, ``python -m bench NAME ...`` some. Figures, never assertions."""
