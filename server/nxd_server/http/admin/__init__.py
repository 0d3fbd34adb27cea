"""Admin routes, which change what is served."""
