"""From a module to a stored graph: export, passes over it, its digest. Knows no backend."""
