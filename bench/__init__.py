"""Benchmarks: ``python -m bench`` runs all, ``python -m bench NAME ...`` some. They only report figures."""
