"""The HTTP layer: routes, keys, limits. It runs no graph."""
