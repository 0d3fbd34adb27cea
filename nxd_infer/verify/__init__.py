"""Compare an artifact with the model that it was traced from."""
