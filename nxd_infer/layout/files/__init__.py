"""Nested values with tensors as safetensors and JSON, without a pickle."""
