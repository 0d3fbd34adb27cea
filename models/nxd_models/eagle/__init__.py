"""EAGLE: one small layer that guesses what a model will say next, from that model's own hidden states."""
