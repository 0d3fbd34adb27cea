"""Checkpoints that neuronx_distributed wrote."""
