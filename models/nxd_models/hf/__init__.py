"""Hugging Face model directories: their configuration files, and their weights by slices."""
