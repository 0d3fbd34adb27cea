"""GPT-NeoX: GPT-NeoX-20B, Pythia."""
