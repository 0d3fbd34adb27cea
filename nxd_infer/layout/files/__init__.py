"""Nested values with tensors, stored as safetensors and JSON without pickle."""
