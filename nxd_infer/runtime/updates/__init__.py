"""New weights and adapters for running ranks."""
