"""Checkpoints that neuronx_distributed wrote, and its converter."""
