"""New weights and adapters for ranks that run."""
