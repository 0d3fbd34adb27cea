"""The processes that this package starts: how to start, watch and end them, and how they end with their parent."""
