"""The routes that change what is served."""
