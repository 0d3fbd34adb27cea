"""The HTTP half: routes, keys, limits. It runs no graph."""
