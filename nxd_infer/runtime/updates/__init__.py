"""New weights and adapters for running ranks. Sharding them needs torch, but ``swap`` does not."""
