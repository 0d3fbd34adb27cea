"""The routes and lines that say how the server is."""
