"""Inside a rank: its weights, states and graphs, and the process that runs them."""
