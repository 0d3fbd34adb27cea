"""From a module to a stored graph: export, passes, digest. Knows no backend."""
